"""What several rooms' tests share, and which tests run beside which (`make test`)."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hosts import Cluster, why_not

# A third of the time that importing torch and vLLM takes is the collector's, which finds nothing.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("any machine", deadline=None)  # a test asserts no time
settings.load_profile("any machine")

SHARING = ("features", "parity", "sudden_end")
"""Of tests/engine: they take turns with the same engines (:func:`tests.engine.engines.run_engine`),
and those that end them come last."""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts, for the tests of a file."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Two processes run tests: each begins with its own half of the files that start engines and
    nothing else, one engine after the other, and both go on with what is left, one test at a time."""
    from xdist.scheduler import LoadScopeScheduling

    root = Path(__file__).parent
    files = [
        root / "test_newer_vllm.py",
        *root.glob("engine/**/test_*.py"),
        *root.glob("faults/*.py"),
    ]
    engines = {
        str(file.relative_to(root.parent)): file.stem.removeprefix("test_") in SHARING
        for file in files
        if "pytest.mark.engine" in file.read_text()
    }

    class EnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            shared = engines.get(nodeid.partition("::")[0])
            return nodeid if shared is None else "shared engines" if shared else "own engines"

    return EnginesTogether(config, log)
