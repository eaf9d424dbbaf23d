"""The reason why an engine ends, which it leaves for whoever started it.

The words are in memory of the outermost process: the supervisor of ``sipipe serve``, the main
process of ``vllm serve``, or the user's own. Every process below finds that memory by an environment
variable, so no argument has to pass through vLLM's front end, and no file is left when all are
killed. The first word counts: what follows a failure says less than its cause.
"""

import os
from contextlib import suppress
from pathlib import Path

from sipipe.linux import memfd_create

VARIABLE = "SIPIPE_LAST_WORD"
"""Variable with the memory's path, ``/proc/PID/fd/NUMBER``."""
NAME = "sipipe-last-word"

_held: dict[int, Path] = {}
"""Memory that this process has made, by process id: a fork has a copy of its parent's entry."""


def hold_last_word() -> None:
    """Make memory for the words of an engine that is about to start, unless an outer process has made
    it. If this process has made it for an earlier engine, its words are removed."""
    path = _held.get(os.getpid())
    if path is None and _place() is not None:
        return
    if path is None:
        path = Path(f"/proc/{os.getpid()}/fd/{memfd_create(NAME)}")
        _held[os.getpid()] = path
    os.environ[VARIABLE] = str(path)
    take_last_word()


def leave_last_word(word: str) -> None:
    """Write why the engine ends, in one line, unless a reason is there already."""
    place = _place()
    if place is not None and not last_word():
        with suppress(OSError):  # the starter is gone, so nobody waits for the word
            place.write_text(" ".join(word.split()), "utf-8", "replace")


def last_word() -> str:
    """The reason why the engine ended; empty if it has left none."""
    place = _place()
    if place is not None:
        with suppress(OSError):
            return place.read_text("utf-8", "replace")
    return ""


def take_last_word() -> str:
    """The last word, which is removed, since the next engine has words of its own."""
    word = last_word()
    place = _place()
    if place is not None and word:
        with suppress(OSError):
            place.write_text("")
    return word


def _place() -> Path | None:
    """The memory, if its process lives. If it does not, its process id may be another's by now, so the
    name is compared."""
    path = os.environ.get(VARIABLE, "")
    with suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{NAME}"):
            return Path(path)
    return None
