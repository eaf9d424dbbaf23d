"""Captured CUDA graphs by <version, batch size> (paper section 4.2).

A captured graph reads the addresses it was captured with, so each input version needs its own.
A batch runs in the smallest captured size that holds it.

Who runs here: the device executor's thread. Capturing happens at start-up, with nothing else on
the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph and the tensors that it leaves its result in."""

    graph: Any
    result: Any


class GraphBank:
    """Graphs of one callable, for each input version and each of ``sizes``.

    Args:
        sizes: batch sizes to capture, each 1 or more.
        versions: input versions.
    """

    def __init__(self, sizes: Sequence[int], versions: int) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError("a graph bank needs batch sizes of 1 or more")
        self._sizes = sorted(set(sizes))
        self._versions = versions
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def versions(self) -> int:
        """Input versions that graphs are captured for."""
        return self._versions

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes, ascending."""
        return tuple(self._sizes)

    def size_for(self, batch: int) -> int | None:
        """The captured size that a batch runs in, or None if it is larger than all."""
        place = bisect.bisect_left(self._sizes, batch)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture(
        self,
        run: Callable[[int, int], Any],
        *,
        before: Callable[[int, int], None] | None = None,
        warm_ups: int = 2,
    ) -> None:
        """Capture ``run(version, size)`` for every version and size, largest first.

        ``before(version, size)`` puts something to read into the inputs; it is not captured, and
        must have done so when it returns. ``run`` must read and write only tensors whose addresses
        stay, and return the tensors of its result. All graphs share one memory pool, so that a
        graph's result is valid until the next graph of the bank runs.

        Raises:
            RuntimeError: without a CUDA device.
        """
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("capturing CUDA graphs needs a CUDA device")
        self._pool = torch.cuda.graph_pool_handle()
        # The warm-ups' stream is the capture's: what libraries keep by stream (workspaces) exists.
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            for version in range(self._versions):
                if before is not None:
                    before(version, size)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(warm_ups):
                        run(version, size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    result = run(version, size)
                self._graphs[version, size] = Captured(graph, result)
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, version: int, size: int) -> Any:
        """Run the graph of <version, size>; returns its result tensors, to be used or copied
        before the next replay.

        Raises:
            KeyError: nothing was captured for it.
        """
        captured = self._graphs[version, size]
        captured.graph.replay()
        return captured.result
