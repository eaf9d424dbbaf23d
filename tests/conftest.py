"""Fixtures that several rooms' tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files that start engines go to one process, where tests run side by side (`make test`)."""
    from xdist.scheduler import LoadScopeScheduling

    root = Path(__file__).parent
    engines = {
        str(file.relative_to(root.parent))
        for file in root.rglob("test_*.py")
        if "pytest.mark.engine" in file.read_text()
    }

    class EnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "engines" if nodeid.partition("::")[0] in engines else nodeid

    return EnginesTogether(config, log)
