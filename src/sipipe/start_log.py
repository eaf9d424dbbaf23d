"""Lines of vLLM's start that SiPipe leaves out of the log, by filters on vLLM's own loggers.

A start of stock vLLM logs 130 lines, of which some are wrong with SiPipe (a warning about its own
scheduler), some are the same from each stage, and some list what nobody who starts a server reads.
``sipipe serve`` leaves all three kinds out; behind vLLM's own command only what is wrong is left out.
``VLLM_LOGGING_LEVEL=DEBUG`` brings back all but that.

Who runs here: the main thread of each process, before it has others.
Relies on: the beginnings of vLLM's messages, which tests/test_start_log.py finds in its source. A message
    that has changed is logged again; nothing else happens.
Rejected: a filter on vLLM's handler. Each ``configure_logging`` makes a new handler, while the filters
    of a logger stay. Rejected: a higher level for stages but the first, which would hide how much memory
    each stage has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Beginnings: TypeAlias = Mapping[str, tuple[str, ...]]
"""Beginnings of messages, by the logger that has them."""

WRONG: Beginnings = {
    # Its class is made for this release, and it schedules ahead (docs/scheduling.md).
    "vllm.config.scheduler": (
        "Using custom scheduler class sipipe.",
        "Using custom scheduler class <class 'sipipe.",
    ),
    # The kernels that want it have others on CPUs (worker/cpu_kernels).
    "vllm.platforms.cpu": ("Triton is not installed.",),
    "torch._library.triton": ("Triton not available",),
}
"""Not so with SiPipe."""

WRONG_OF_ENGINES: Beginnings = {
    # On CPUs vLLM sets that itself. Where the user has, the server's process has said it before.
    "vllm.config.vllm": ("Inductor compilation was disabled by user settings",),
}
"""Not so with SiPipe, in the engine's process."""

LENGTHY: Beginnings = {
    "vllm.config.kernel": ("Final IR op priority",),
    "vllm.entrypoints.launchers.launcher": (
        "\n       ",  # vLLM's name, in large letters
        "Available routes are:",
        "Route: ",
    ),
    "vllm.entrypoints.launchers.api_server.entry": ("Supported tasks: ",),
    "vllm.entrypoints.scale_out.factories": ("Scale-out endpoints are disabled",),
    "vllm.renderers.hf": ("Detected the chat template content format",),
    "uvicorn.error": ("Started server process", "Waiting for application startup."),
    "vllm.utils.ompmultiprocessing": ("OpenMP thread binding info",),
    "vllm.distributed.parallel_state": ("world_size=1 rank=0 ", "rank 0 in world size 1 "),
    "vllm.v1.worker.cpu_worker": ("Using V2 Model Runner",),
    "vllm.v1.worker.gpu_worker": ("Using V2 Model Runner",),
    "vllm.v1.worker.gpu.model_runner": ("Loading model from scratch",),
    "vllm.v1.worker.cpu.model_runner": ("Warming up done",),
    "vllm.v1.worker.cpu_model_runner": ("Warming up done",),
    "vllm.v1.attention.backends.utils": ("Using LBHNC KV cache layout",),
    "vllm.compilation.monitor": ("[backbone] Initial profiling",),
    "vllm.model_executor.model_loader.default_loader": ("Loading weights took",),
    "vllm.model_executor.model_loader.base_loader": ("Initializing model took",),
    "vllm.model_executor.model_loader.weight_utils": (
        "Filesystem type for checkpoints",
        "Auto-prefetch is disabled",
    ),
}
"""Said in SiPipe's own lines, or of no use at a start."""

REPEATED: Beginnings = {
    # vLLM makes the model's configuration in the foreground, and for its server once more.
    "vllm.config.model": (
        "Resolved architecture",
        "Downcasting",
        "Upcasting",
        "Using max model len",
    ),
    "vllm.config.scheduler": ("Chunked prefill is enabled",),
    "vllm.model_executor.models.utils": ("Attempted to load weight",),
    "vllm.v1.worker.cpu.model_runner": ("Warming up model for the compilation",),
    "vllm.v1.worker.cpu_model_runner": ("Warming up model for the compilation",),
}
"""Logged once by each process: the first message with this beginning stands for all."""

OF_THE_FIRST: Beginnings = {
    "vllm.v1.worker.cpu_worker": ("libtcmalloc", "libiomp"),
    "vllm.v1.worker.cpu.model_runner": ("Warming up",),
    "vllm.v1.worker.cpu_model_runner": ("Warming up",),
    "vllm.model_executor.layers.utils": ("Failed to create oneDNN linear",),
    "vllm.model_executor.models.utils": ("Attempted to load weight",),
    "vllm.compilation.decorators": (
        "[backbone] saved AOT compiled function",
        "[backbone] Directly load AOT compilation",
    ),
}
"""The same from every worker: a host's first one says it for all."""


@dataclass(frozen=True)
class LeftOut:
    """A filter of a logger, which drops messages by their beginnings. Equal ones count as one, so that
    a logger has each of them once, however often it is added."""

    beginnings: tuple[str, ...]
    but_the_first: bool = False
    """True: the first message with each beginning is logged."""
    _logged: set[str] = field(default_factory=set, compare=False)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record that is dropped."""
        message = record.getMessage()
        for beginning in self.beginnings:
            if message.startswith(beginning):
                first = self.but_the_first and beginning not in self._logged
                self._logged.add(beginning)
                return first
        return True


def leave_out_what_is_wrong(*, engine: bool = False) -> None:
    """Leave messages out that are not so with SiPipe; ``engine``: this is the engine's process."""
    _add(WRONG)
    if engine:
        _add(WRONG_OF_ENGINES)


def shorten(*, first: bool = True) -> None:
    """Shorten this process's part of the log of a start, in a command of SiPipe's own. ``first``: it is
    no worker, or the first one of its host."""
    leave_out_what_is_wrong()
    if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        return
    _add(LENGTHY)
    _add(REPEATED, but_the_first=True)
    if not first:
        _add(OF_THE_FIRST)


def _add(table: Beginnings, *, but_the_first: bool = False) -> None:
    for name, beginnings in table.items():
        logging.getLogger(name).addFilter(LeftOut(beginnings, but_the_first))
