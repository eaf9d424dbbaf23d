"""Fixtures that several rooms' tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")
