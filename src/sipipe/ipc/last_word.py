"""Why an engine ends, as it says itself, for whoever started it.

The words are in memory that the outermost process has: the supervisor of ``sipipe serve``, the main
process of ``vllm serve``, or the user's own. Every process below finds that memory by an environment
variable, so it takes no argument through vLLM's front end, and leaves no file when all are killed.
The first word counts: what follows a failure says less than its cause.
"""

import os
from contextlib import suppress
from pathlib import Path

from sipipe.linux import memfd_create

VARIABLE = "SIPIPE_LAST_WORD"
"""Where the memory is: ``/proc/PID/fd/NUMBER``."""
NAME = "sipipe-last-word"

_held: dict[int, Path] = {}
"""The memory that this process has made, by its number: a fork has its parent's."""


def hold_last_word() -> None:
    """See that there is a place for the words of an engine that is about to start. One that this
    process has made is emptied: what an earlier engine has said is no news."""
    ours = _held.get(os.getpid())
    if ours is None and _place() is not None:
        return
    if ours is None:
        ours = Path(f"/proc/{os.getpid()}/fd/{memfd_create(NAME)}")
        _held[os.getpid()] = ours
    os.environ[VARIABLE] = str(ours)
    take_last_word()


def leave_last_word(word: str) -> None:
    """Say why the engine ends, in one line, unless that has been said."""
    place = _place()
    if place is not None and not last_word():
        with suppress(OSError):  # who started it is gone, so nobody waits for a word
            place.write_text(" ".join(word.split()), "utf-8", "replace")


def last_word() -> str:
    """Why the engine ended; empty if it has not said so."""
    place = _place()
    if place is not None:
        with suppress(OSError):
            return place.read_text("utf-8", "replace")
    return ""


def take_last_word() -> str:
    """The same, and forget it: the next engine has words of its own."""
    word = last_word()
    place = _place()
    if place is not None and word:
        with suppress(OSError):
            place.write_text("")
    return word


def _place() -> Path | None:
    """The memory, if who has made it lives; its number may be another process's by now."""
    path = os.environ.get(VARIABLE, "")
    with suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{NAME}"):
            return Path(path)
    return None
