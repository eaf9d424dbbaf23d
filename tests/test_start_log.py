"""What is left out of a start's log: messages that vLLM's source has, and nothing of another meaning."""

import importlib.util
import logging
import re
from pathlib import Path

import pytest

from sipipe import start_log
from sipipe.start_log import LeftOut, leave_out_what_is_wrong, shorten

TABLES = ("WRONG", "WRONG_OF_ENGINES", "LENGTHY", "REPEATED", "OF_THE_FIRST")
ROWS = [
    (name, beginning)
    for table in TABLES
    for name, beginnings in getattr(start_log, table).items()
    for beginning in beginnings
]
FILLED_IN = re.compile(
    r" (sipipe\.|<class 'sipipe\.)$"  # after it, the class that vLLM names
    r"|\[backbone\] |1 |0 |LBHNC|^\n       |^(libtcmalloc|libiomp)$"
)
"""What vLLM fills into its messages."""


@pytest.fixture
def loggers():
    """The loggers of all tables, without filters; afterwards as they were."""
    named = [logging.getLogger(name) for name in {name for name, _ in ROWS}]
    before = [list(logger.filters) for logger in named]
    for logger in named:
        logger.filters.clear()
    yield
    for logger, filters in zip(named, before, strict=True):
        logger.filters[:] = filters


def record(logger: str, message: str) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.INFO, "", 0, message, (), None)


def logged(logger: str, message: str) -> bool:
    return bool(logging.getLogger(logger).filter(record(logger, message)))


def test_what_is_wrong_is_left_out_and_a_users_own_scheduler_is_warned_about(loggers):
    leave_out_what_is_wrong()
    scheduler = "vllm.config.scheduler"
    warning = "Using custom scheduler class %s. This scheduler interface is not public"
    assert not logged(scheduler, warning % "sipipe.engine.scheduling.scheduler.PipelineScheduler")
    assert not logged(scheduler, warning % "<class 'sipipe.engine.scheduling.scheduler.Any'>")
    assert logged(scheduler, warning % "mine.Scheduler")
    assert logged("vllm.entrypoints.launchers.launcher", "Route: /health, Methods: GET")


def test_a_commands_log_is_short_and_debug_brings_it_back(loggers, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    shorten()
    launcher = "vllm.entrypoints.launchers.launcher"
    assert logged(launcher, "Route: /health, Methods: GET")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    shorten()
    assert not logged(launcher, "Route: /health, Methods: GET")
    assert logged(launcher, "[shutdown] API server: shutdown triggered")


def test_a_repeated_message_is_logged_once_and_of_all_workers_by_the_first(loggers):
    shorten()
    weights = "vllm.model_executor.models.utils"
    message = "Attempted to load weight %s with dtype torch.float32 into parameter"
    assert [logged(weights, message % name) for name in "abc"] == [True, False, False]
    shorten(first=False)
    assert not logged("vllm.v1.worker.cpu_worker", "libiomp is not found in LD_PRELOAD.")
    assert logged("vllm.v1.worker.gpu.model_runner", "Model loading took 3.1 GiB memory")


def test_a_filter_is_added_once(loggers):
    for _ in range(3):
        shorten(first=False)
    for name in {name for name, _ in ROWS}:
        ours = [found for found in logging.getLogger(name).filters if isinstance(found, LeftOut)]
        assert len(ours) == len(set(ours))


@pytest.mark.parametrize(("logger", "beginning"), ROWS)
def test_every_row_is_a_message_of_that_logger(logger, beginning):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    module = "uvicorn.server" if logger == "uvicorn.error" else logger
    source = Path(importlib.util.find_spec(module).origin).read_text()
    if module == "uvicorn.server":
        on = importlib.util.find_spec("uvicorn.lifespan.on")
        source += Path(on.origin).read_text()
    plain = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that go on in the next line
    pieces = [piece.strip() for piece in FILLED_IN.sub("%", beginning).split("%")]
    assert all(piece in plain or piece == "" for piece in pieces), pieces
