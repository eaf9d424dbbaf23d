"""A check of token safety: who may touch a set of input buffers, and who does.

Stages of tests and of their engines are watched by it (:mod:`tests.worker.watched_stage`).

Who runs here: the preparing thread (``begin_write``, ``end_write``) and the device thread
(``begin_read``, ``end_read``).

Guarantees: the first time that a set is written while it is read, read while it is written,
written before its last contents were read, or read with contents of another iteration, the
offending call raises :class:`TokenSafetyError`, which names the set and both iterations.

Relies on: one lock around each transition; the buffers themselves are not touched here.
Rejected: checksums of the buffers, which find an overlap only when the values differ.
"""

import threading


class TokenSafetyError(Exception):
    """Input buffers were about to be written while the device may read them, or the reverse."""

    def __init__(self, what: str) -> None:
        super().__init__(f"token safety: {what}")


class TokenSafety:
    """What each of ``sets`` sets of input buffers holds; see the module's text."""

    def __init__(self, sets: int) -> None:
        self._held = ["nothing new"] * sets
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it

    def begin_write(self, buffer_set: int, iteration: int) -> None:
        """The preparing thread starts to write the inputs of ``iteration``."""
        what = f"inputs of iteration {iteration} would overwrite input buffer set {buffer_set}"
        self._step(buffer_set, what, "nothing new", f"iteration {iteration}, being written")

    def end_write(self, buffer_set: int, iteration: int) -> None:
        """``buffer_set`` now holds the inputs of ``iteration``."""
        held = f"iteration {iteration}, being written"
        self._step(buffer_set, "end_write without its begin_write", held, f"iteration {iteration}")

    def begin_read(self, buffer_set: int, iteration: int) -> None:
        """The device starts to read the inputs of ``iteration``."""
        what = f"the device would read iteration {iteration} from input buffer set {buffer_set}"
        held = f"iteration {iteration}"
        self._step(buffer_set, what, held, f"iteration {iteration}, being read")

    def end_read(self, buffer_set: int, iteration: int) -> None:
        """The device is done with ``iteration``; ``buffer_set`` may be written again."""
        held = f"iteration {iteration}, being read"
        self._step(buffer_set, "end_read without its begin_read", held, "nothing new")

    def _step(self, buffer_set: int, what: str, before: str, after: str) -> None:
        """From ``before`` to ``after``; anything else there is what ``what`` must not meet."""
        with self._lock:
            held = self._held[buffer_set]
            if held != before:
                raise TokenSafetyError(f"{what}, which holds {held}")
            self._held[buffer_set] = after
