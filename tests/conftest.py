"""Fixtures of the engine tests; all of them are skipped where vLLM is not installed."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")
