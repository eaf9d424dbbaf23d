"""The debug check of token safety: who may touch a set of input buffers, and who does.

Who runs here: the preparing thread (``begin_write``, ``end_write``) and the device thread
(``begin_read``, ``end_read``).

Guarantees: the first time that a set is written while it is read, read while it is written,
written before its last contents were read, or read with contents of another iteration, the
offending call raises :class:`TokenSafetyError`, which names the set and both iterations.

Relies on: one lock around each transition; the buffers themselves are not touched here.
Rejected: checksums of the buffers, which find an overlap only when the values differ.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from sipipe.errors import SiPipeError


class TokenSafetyError(SiPipeError):
    """Input buffers were about to be written while the device may read them, or the reverse."""

    def __init__(self, what: str) -> None:
        super().__init__(f"token safety: {what}")


@dataclass(slots=True)
class _Stamp:
    writer: int | None = None
    """Iteration that is writing now."""
    reader: int | None = None
    """Iteration that is reading now."""
    content: int | None = None
    """Iteration whose inputs the set holds and which has not been read yet."""


class TokenSafety:
    """Stamps for ``sets`` sets of input buffers; see the module's text."""

    def __init__(self, sets: int) -> None:
        self._stamps = [_Stamp() for _ in range(sets)]
        self._lock = threading.Lock()

    def begin_write(self, buffer_set: int, iteration: int) -> None:
        """The preparing thread starts to write the inputs of ``iteration``."""
        with self._lock:
            stamp = self._stamps[buffer_set]
            overwrite = f"inputs of iteration {iteration} would overwrite input buffer set"
            if stamp.reader is not None:
                raise TokenSafetyError(
                    f"{overwrite} {buffer_set} while the device reads iteration {stamp.reader} "
                    "from it"
                )
            if stamp.writer is not None:
                raise TokenSafetyError(
                    f"{overwrite} {buffer_set} while iteration {stamp.writer} is written to it"
                )
            if stamp.content is not None:
                raise TokenSafetyError(
                    f"{overwrite} {buffer_set} before the device has read iteration "
                    f"{stamp.content} from it"
                )
            stamp.writer = iteration

    def end_write(self, buffer_set: int, iteration: int) -> None:
        """``buffer_set`` now holds the inputs of ``iteration``."""
        with self._lock:
            stamp = self._stamps[buffer_set]
            assert stamp.writer == iteration, "end_write without its begin_write"
            stamp.writer, stamp.content = None, iteration

    def begin_read(self, buffer_set: int, iteration: int) -> None:
        """The device starts to read the inputs of ``iteration``."""
        with self._lock:
            stamp = self._stamps[buffer_set]
            read = f"the device would read iteration {iteration} from input buffer set {buffer_set}"
            if stamp.writer is not None:
                raise TokenSafetyError(f"{read} while iteration {stamp.writer} is written to it")
            if stamp.content != iteration:
                held = "nothing new" if stamp.content is None else f"iteration {stamp.content}"
                raise TokenSafetyError(f"{read}, which holds {held}")
            stamp.reader, stamp.content = iteration, None

    def end_read(self, buffer_set: int, iteration: int) -> None:
        """The device is done with ``iteration``; ``buffer_set`` may be written again."""
        with self._lock:
            stamp = self._stamps[buffer_set]
            assert stamp.reader == iteration, "end_read without its begin_read"
            stamp.reader = None
