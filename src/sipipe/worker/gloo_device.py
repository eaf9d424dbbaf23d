"""One gloo device for all process groups of a worker.

vLLM makes more than a dozen process groups in every worker, and torch gives each gloo group a
device with a thread that wakes up a hundred times a second, whether anything happens or not: 0.8 %
of a core in a worker that does nothing. Groups can share a device, so here they do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

__all__ = ["one_gloo_device"]


class _SharingGloo(ProcessGroupGloo):
    """A gloo group on the device of all others."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _devices()
        super().__init__(store, rank, size, options)


@functools.cache
def _devices() -> list[Any]:
    """What torch would make for each group, by the same variable."""
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [ProcessGroupGloo.create_default_device()]


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """While active, gloo groups that torch makes share one device."""
    with patch.object(distributed_c10d, "ProcessGroupGloo", _SharingGloo):
        yield
