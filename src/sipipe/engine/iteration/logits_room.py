"""Which rows of BIC-L's memory the logits of an iteration get.

How many there are, and why: docs/channels.md, "Rows of BIC-L".

Runs under the lock of :class:`sipipe.engine.iteration.iterations.Iterations`.
"""


def rows_needed(sequences: int, inflight: int) -> int:
    """Rows for at most ``sequences`` running requests and ``inflight`` microbatches. With twice as
    many there is a gap wherever the others lie, but for 4 of 1,200,000 of random sizes."""
    return sequences if inflight == 1 else 2 * sequences


class LogitsRoom:
    """Rows 0 to ``rows`` - 1, and who has them."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._taken: dict[int, tuple[int, int]] = {}
        """First row and the one after the last, by iteration. No two overlap."""

    def find(self, count: int) -> int | None:
        """The lowest row with ``count`` free ones from it on; None: not now. The lowest, so that with
        few requests few pages are ever used, and stay in the caches."""
        first = 0
        for start, end in sorted(self._taken.values()):
            if first + count <= start:
                break
            first = end
        return first if first + count <= self._rows else None

    def take(self, iteration: int, count: int) -> int:
        """Give ``iteration`` its rows, for which there is room; returns the first, -1 if none."""
        if not count:
            return -1
        first = self.find(count)
        assert first is not None, f"{count} rows in one iteration, of {self._rows} at most"
        self._taken[iteration] = first, first + count
        return first

    def give_back(self, iteration: int) -> None:
        """Nobody reads the rows of ``iteration`` any more."""
        self._taken.pop(iteration, None)
