"""The debug check of token safety: who may touch an input version, and who does.

Who runs here: the CPU executor's thread (``begin_write``, ``end_write``) and the device
executor's (``begin_read``, ``end_read``); with a device that runs on after the call returns,
``end_read`` belongs where its last kernel is known to be done.

Guarantees: the first time a version is written while it is read, read while it is written,
written before its last contents were read, or read with contents of another iteration, the
offending call raises :class:`TokenSafetyError`, which names the version and both iterations.

Relies on: one lock around each transition; the buffers themselves are not touched here.
Rejected: checksums of the buffers, which find an overlap only when the values differ.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from sipipe.errors import SiPipeError


class TokenSafetyError(SiPipeError):
    """An input version was about to be overwritten while the device may read it, or the reverse."""


@dataclass(slots=True)
class _Stamp:
    writer: int | None = None
    """Iteration that is writing now."""
    reader: int | None = None
    """Iteration that is reading now."""
    content: int | None = None
    """Iteration whose inputs the version holds and which has not been read yet."""


class TokenSafety:
    """Stamps for ``versions`` input versions; see the module's text."""

    def __init__(self, versions: int) -> None:
        self._stamps = [_Stamp() for _ in range(versions)]
        self._lock = threading.Lock()

    def begin_write(self, version: int, iteration: int) -> None:
        """The CPU executor starts to write iteration ``iteration`` into ``version``."""
        with self._lock:
            stamp = self._stamps[version]
            if stamp.reader is not None:
                raise TokenSafetyError(
                    f"token safety: inputs of iteration {iteration} would overwrite version "
                    f"{version} while the device reads iteration {stamp.reader} from it"
                )
            if stamp.writer is not None:
                raise TokenSafetyError(
                    f"token safety: iterations {stamp.writer} and {iteration} write version "
                    f"{version} at the same time"
                )
            if stamp.content is not None:
                raise TokenSafetyError(
                    f"token safety: inputs of iteration {iteration} would overwrite version "
                    f"{version} before the device has read iteration {stamp.content} from it"
                )
            stamp.writer = iteration

    def end_write(self, version: int, iteration: int) -> None:
        """``version`` now holds the inputs of ``iteration``."""
        with self._lock:
            stamp = self._stamps[version]
            assert stamp.writer == iteration, "end_write without its begin_write"
            stamp.writer = None
            stamp.content = iteration

    def begin_read(self, version: int, iteration: int) -> None:
        """The device starts to read iteration ``iteration`` from ``version``."""
        with self._lock:
            stamp = self._stamps[version]
            if stamp.writer is not None:
                raise TokenSafetyError(
                    f"token safety: the device would read iteration {iteration} from version "
                    f"{version} while iteration {stamp.writer} is written to it"
                )
            if stamp.content != iteration:
                held = "nothing new" if stamp.content is None else f"iteration {stamp.content}"
                raise TokenSafetyError(
                    f"token safety: the device would read iteration {iteration} from version "
                    f"{version}, which holds {held}"
                )
            stamp.reader = iteration
            stamp.content = None

    def end_read(self, version: int, iteration: int) -> None:
        """The device is done with ``iteration``; ``version`` may be written again."""
        with self._lock:
            stamp = self._stamps[version]
            assert stamp.reader == iteration, "end_read without its begin_read"
            stamp.reader = None
