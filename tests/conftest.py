"""What several rooms' tests share, and which tests run beside which (`make test`)."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from sipipe import start_log
from tests.hosts import Cluster, why_not

# A third of the time that importing torch and vLLM takes is the collector's, which finds nothing.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("any machine", deadline=None)  # a test asserts no time
settings.load_profile("any machine")

SHARING = ("features", "parity", "sudden_end")
"""Of tests/engine: they take turns with the same engines (:func:`tests.engine.engines.run_engine`),
and those that end them come last."""

WHOLE = (
    "tests/engine/layers/test_layers.py",
    "tests/engine/scheduling/test_blocks.py",
    "tests/engine/scheduling/test_scheduler.py",
    "tests/sampler/test_processes.py",
)
"""Start no engine; what their tests share takes seconds, and would be made in both processes."""


FILTERED = {
    name
    for table in (
        start_log.WRONG,
        start_log.WRONG_OF_ENGINES,
        start_log.LENGTHY,
        start_log.REPEATED,
        start_log.OF_THE_FIRST,
    )
    for name in table
}
"""Names of the loggers that SiPipe filters."""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where generated checkpoints live for the session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A test leaves no variable behind: vLLM's parsers set some, and a server that a later test starts
    would take them for the user's."""
    before = dict(os.environ)
    yield
    if before != dict(os.environ):
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def own_filters() -> Iterator[None]:
    """A test leaves no filter on vLLM's loggers behind: a worker or a server that runs in the test's own
    process shortens its log (:mod:`sipipe.start_log`)."""
    loggers = [logging.getLogger(name) for name in FILTERED]
    before = [list(logger.filters) for logger in loggers]
    yield
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters[:] = filters


@pytest.fixture
def caplog(caplog, monkeypatch):
    """pytest's, which hears the loggers of vLLM and of SiPipe, too: they hand nothing to the root logger,
    the first configuration of a process sets them up anew, without a handler added before, and a command
    that ran in this process may have silenced them (``sipipe generate``)."""
    caplog.set_level(logging.INFO, logger="vllm")
    call_handlers = logging.Logger.callHandlers

    def call_these_and_ours(logger, record) -> None:
        call_handlers(logger, record)
        if record.name.startswith("vllm.") and not logging.getLogger("vllm").propagate:
            caplog.handler.handle(record)

    monkeypatch.setattr(logging.Logger, "callHandlers", call_these_and_ours)
    return caplog


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts, for the tests of a file."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster()
    yield cluster
    cluster.close()


def _engines() -> dict[str, bool]:
    """Of files that are run as a whole whether they share engines, in the order in which they run."""
    root = Path(__file__).parent
    files = [*root.glob("engine/**/test_*.py"), *root.glob("faults/*.py")]
    started = [file for file in sorted(files) if "pytest.mark.engine" in file.read_text()]
    shared = [file.stem.removeprefix("test_") in SHARING for file in started]
    last = {
        str(file.relative_to(root.parent)): it for file, it in zip(started, shared, strict=True)
    }
    first = {name: True for name, it in last.items() if it}
    alone = ("tests/test_newer_vllm.py", "tests/test_tutorial.py")
    return first | dict.fromkeys(alone, False) | last | dict.fromkeys(WHOLE, False)


ENGINES = _engines()


def pytest_collection_modifyitems(items) -> None:
    places = {name: place for place, name in enumerate(ENGINES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: to look through it takes half a second each time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Three processes run tests. Files that start engines come first, one engine after the other in
    each process: those that share them in one, the others file by file in those that are free.
    What is left is taken one test at a time, so that both end together."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # in the order above, not the most tests first

    class EnginesFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return nodeid if file not in ENGINES else "shared engines" if ENGINES[file] else file

    return EnginesFirst(config, log)
