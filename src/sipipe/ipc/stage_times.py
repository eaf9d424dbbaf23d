"""What the processes have taken so far, in shared memory, for the engine's scheduler.

    byte 0     identity of the memory
    byte 64    executor: batches, sequences, tokens, then       one line of 8 words per process,
               nanoseconds of up to five phases                 signed, native order
    byte 128   stage 0: ...    stages, then samplers

Who runs here: the engine makes the memory and reads; it, the first tensor-parallel rank of each
stage and each sampler write the line that is theirs.

Guarantees: totals only grow, and reading never makes a writer wait. Words read one after the other
may be from different moments: what is missing from one reading is in the next.

Relies on: one writer per word: each line has one process, and each phase of it one thread. Aligned
8-byte loads and stores are single instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sipipe.ipc.memory import PAGE, Endpoint, SharedMemory, round_up

LINE_WORDS = 8
_LINE_BYTES = 8 * LINE_WORDS


class Taken(NamedTuple):
    """What a process took for some batches."""

    batches: int
    sequences: int
    tokens: int
    nanoseconds: int

    @classmethod
    def of(cls, line: memoryview, phases: slice = slice(None)) -> Taken:
        """The total so far; of ``phases`` among those that count, in their order."""
        batches, sequences, tokens, *nanoseconds = line
        return cls(batches, sequences, tokens, sum(nanoseconds[phases]))

    def __sub__(self, before: Taken) -> Taken:
        return Taken(*(now - then for now, then in zip(self, before, strict=True)))


class PhaseCounter:
    """Adds to one process's line. It takes phases as a recorder hands them on.

    Args:
        line: the process's own.
        phases: at most five whose time counts.
        last: the phase that ends a batch, and brings its sequences and tokens.
    """

    __slots__ = ("_last", "_line", "_word_of")

    def __init__(self, line: memoryview, phases: Sequence[int], last: int) -> None:
        self._line = line
        self._word_of = {int(phase): 3 + index for index, phase in enumerate(phases)}
        self._last = int(last)
        assert 3 + len(phases) <= len(line) == LINE_WORDS

    def phase(
        self, phase: int, _iteration: int, start_ns: int, end_ns: int, batch: int, tokens: int
    ) -> None:
        """Add one phase. Batches are counted last: who sees the batch sees its sequences."""
        line = self._line
        word = self._word_of.get(phase)
        if word is not None:
            line[word] += end_ns - start_ns
        if phase == self._last:
            line[1] += batch
            line[2] += tokens
            line[0] += 1


class StageTimes:
    """The lines of all stages and samplers. Made with :meth:`create` or :meth:`attach`."""

    def __init__(self, memory: SharedMemory, stages: int) -> None:
        self._memory = memory
        self._words = memoryview(memory.map).cast("q")
        self._stages = stages

    @classmethod
    def create(cls, *, stages: int, samplers: int, directory: str | None = None) -> StageTimes:
        """Make the memory, all zero.

        Raises:
            ResourceError: there is not that much room.
        """
        size = cls.required_bytes(stages=stages, samplers=samplers)
        return cls(SharedMemory.create("stage-times", size, directory), stages)

    @classmethod
    def attach(cls, endpoint: Endpoint, *, stages: int) -> StageTimes:
        """Map what another process made. Raises ChannelPeerDied if that one is gone."""
        return cls(SharedMemory.attach(endpoint), stages)

    @staticmethod
    def required_bytes(*, stages: int, samplers: int) -> int:
        """Shared memory that these take."""
        return round_up((2 + stages + samplers) * _LINE_BYTES, PAGE)

    @property
    def endpoint(self) -> Endpoint:
        """What the other processes need, while this one lives."""
        return self._memory.endpoint

    def line(self, role: str, index: int = 0) -> memoryview:
        """The line of the ``executor``, or of a ``stage`` or ``sampler``: 8 words."""
        number = {"executor": 0, "stage": 1, "sampler": 1 + self._stages}[role] + index
        return self._words[(1 + number) * LINE_WORDS :][:LINE_WORDS]

    def close(self) -> None:
        """Let go of the memory; lines that are still out keep the mapping alive."""
        self._memory.close()
