"""Errors that SiPipe raises when something outside its own code is at fault, and their one line.

Every message is one line that names the option, file or process and says what to do. A bug of
ours is an ``AssertionError`` instead.
"""

import errno
import sys
from contextlib import suppress

_REMEDIES = {
    errno.EMFILE: "let a process have more open files (ulimit -n)",
    errno.EFBIG: "let a process write larger files (ulimit -f)",
    errno.ENOMEM: "free memory, or let a process have more (ulimit -v)",
}
"""Remedies, by the number of an error for which the kernel says no more than that a limit was reached."""


def one_line(error: BaseException) -> str:
    """The message of ``error`` in one line, as a part of messages, with a remedy where a limit was
    reached; of one without a message its type's name."""
    return (" ".join(str(error).split()) or type(error).__name__) + remedy(error)


def remedy(error: BaseException) -> str:
    """The end of a message about ``error``: what to do where a limit was reached, else nothing."""
    number = error.errno if isinstance(error, OSError) else None
    return f": {_REMEDIES[number]}" if number in _REMEDIES else ""


def tell(line: object) -> None:
    """Write one line for whoever started this process, after the command's name."""
    # A value that the line repeats, such as a path, may have line breaks of its own.
    say("sipipe: " + " ".join(part.strip() for part in str(line).splitlines()))


def say(text: str) -> None:
    """Write a text to standard error. What cannot be written there ends nothing."""
    # The terminal is closed, who read the log is gone, or the log's disk is full.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class SiPipeError(Exception):
    """Base of every error that SiPipe raises for a reason that the user can act on."""

    status = 1
    """Exit status of a command. 2: another try with the same options is no use."""


class ConfigError(SiPipeError, ValueError):
    """An option is unknown, has a bad value, or contradicts another one."""

    status = 2


class UnsupportedError(SiPipeError):
    """A vLLM version or a feature that SiPipe cannot serve; names the option."""

    status = 2


class ResourceError(SiPipeError):
    """This machine lacks something: shared memory, disk space, cores, a compiler, a package."""


class DamagedError(SiPipeError):
    """A message of another process cannot be read; names the message."""


class StallError(SiPipeError, TimeoutError):
    """A wait reached its bound; names who waits, in which iteration, and for what."""


class WorkerDiedError(SiPipeError):
    """A stage worker or a sampler process ended without being asked to; names it."""


class EngineDiedError(SiPipeError, RuntimeError):
    """An engine's process ended while it started; says which one, how, and why. RuntimeError, as
    vLLM's own is."""

    def __init__(self, cause: str, *, wrong: bool = False) -> None:
        super().__init__(cause or "an engine process ended while it started")
        self.status = 2 if wrong else 1
