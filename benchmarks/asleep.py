"""Stock vLLM whose processes sleep where they would spin: extensions of its worker and scheduler.

    PYTHONPATH=. vllm serve MODEL --pipeline-parallel-size 2 \\
        --worker-extension-cls benchmarks.asleep.Readers \\
        --scheduler-cls benchmarks.asleep.Scheduler

vLLM imports both in the processes that they are for. Two things spin there:

- who reads a message queue, for a second after the last message; then it sleeps, until it is
  notified, as it does here at once. A notification is dropped while another one is on its way, so a
  reader that sleeps looks again every :data:`LOOKS` ms;
- a stage that waits for hidden states in vLLM's shared memory. ``ReadersAndLinks`` takes them through
  gloo in its place, whose waits sleep, but which copies more and sends a description along.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.core.sched import scheduler

LOOKS = 1
"""Milliseconds: short beside a step here of 50."""

# The time that a reader compares with stays that of its start.
assert hasattr(SpinCondition, "record_read"), "vLLM has no SpinCondition.record_read"
SpinCondition.record_read = lambda self: None  # type: ignore[method-assign]
_wait = SpinCondition.wait


def _looking(self: SpinCondition, timeout_ms: int | None = None) -> None:
    _wait(self, LOOKS if timeout_ms is None else min(timeout_ms, LOOKS))


SpinCondition.wait = _looking  # type: ignore[method-assign]


class Readers:
    """Mixed into the worker's class, to which it adds nothing."""


class Scheduler(scheduler.Scheduler):
    """vLLM's; to name it has EngineCore import this module."""


def __getattr__(name: str) -> type:
    if name != "ReadersAndLinks":
        raise AttributeError(name)
    shared = "_all_group_ranks_share_shm_group_name"
    assert hasattr(CpuCommunicator, shared), f"vLLM has no {shared}"
    setattr(CpuCommunicator, shared, lambda self: False)
    return Readers
