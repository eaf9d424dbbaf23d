"""A graph bank without a device: plain calls in place of graphs, what it is given kept in place.

Not a test: lets the padding of decode batches and its metadata be tested on a CPU.
"""

from __future__ import annotations

from typing import Any

from sipipe.worker.graph_bank import GraphBank


class PlainBank(GraphBank):
    """The interface of :class:`GraphBank`; "captures" by running once, as a device would."""

    def capture(self, run: Any, *, before: Any = None, warm_ups: int = 1) -> None:
        self._run = run
        for version in range(self.versions):
            for size in reversed(self.sizes):
                before(version, size)
                for _ in range(warm_ups):
                    run(version, size)

    def replay(self, version: int, size: int) -> Any:
        return self._run(version, size)
