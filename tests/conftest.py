"""Fixtures that several rooms' tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Engine tests run one after the other, also where tests run side by side (`make test`)."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.xdist_group("engines"))
