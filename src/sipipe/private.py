"""Directories that nobody else can have written to, for what SiPipe keeps from one start to the next.

Used by :mod:`sipipe.jit`, whose kernels are pickles and machine code, by :mod:`sipipe.kept`, and by
the checks in the foreground, which import neither Numba nor LLVM: a worker that is forked later
could not be set up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from sipipe.errors import ConfigError

VARIABLE = "SIPIPE_CACHE_DIR"
CODE = ("*.nbi", "*.nbc")
"""Files that are executed: Numba's index and its code."""


class UnusableError(Exception):
    """A directory cannot be taken; says why."""


def private_directory(base: Path, parts: Sequence[str]) -> Path:
    """Return the directory ``base/parts``, made unless it exists. ``base`` and all below it are this
    user's or root's, and nobody else can write there. What is above ``base`` is the business of
    whoever names it.

    Raises UnusableError: it is not so. OSError: it cannot be made."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of a base that is a link the target counts: who could exchange the link is above it.
    _check(base, base.stat(), stat.S_ISDIR, sticky=True)
    directory = base
    for part in parts:
        directory = directory / part
        directory.mkdir(mode=0o700, exist_ok=True)
        _check(directory, directory.lstat(), stat.S_ISDIR)
    return directory


def code_directory(base: Path, parts: Sequence[str]) -> Path:
    """Return the private directory ``base/parts``, whose code files are this user's or root's too.

    Raises UnusableError: it is not so, or the directory can neither be written nor has any code in
    it. OSError: it cannot be made."""
    directory = private_directory(base, parts)
    code = [file for pattern in CODE for file in directory.glob(pattern)]
    for file in code:
        _check(file, file.lstat(), stat.S_ISREG)
    if not code and not os.access(directory, os.W_OK):
        raise UnusableError(f"{directory} cannot be written, and has no kernels for this CPU in it")
    return directory


def _check(
    path: Path,
    state: os.stat_result,
    of_its_kind: Callable[[int], bool],
    *,
    sticky: bool = False,
) -> None:
    """``sticky``: others may add files, but exchange none of this user's, as in /tmp."""
    mode = state.st_mode
    if not of_its_kind(mode):
        raise UnusableError(
            f"{path} is not a {'directory' if of_its_kind is stat.S_ISDIR else 'file'}"
        )
    if state.st_uid not in (os.geteuid(), 0):
        raise UnusableError(f"{path} is another user's ({state.st_uid})")
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (sticky and mode & stat.S_ISVTX):
        raise UnusableError(f"others can write to {path}: chmod go-w {path}")


def read_private(file: Path, most: int) -> bytes:
    """The content of a file in a private directory, ``most`` bytes at most. It is this user's or
    root's, and nobody else can write to it.

    Raises UnusableError: it is not so. OSError: it cannot be read."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(descriptor)
        _check(file, state, stat.S_ISREG)
        if state.st_size > most:
            raise UnusableError(f"{file} has {state.st_size} bytes, more than {most}")
        return opened.read(most)


def cache_base() -> Path:
    """The directory below which SiPipe keeps what it finds out: the one that the user names, else
    one in the user's cache directory. Raises RuntimeError: this user has no home. OSError: what is
    above it cannot be made."""
    if (named := named_directory()) is not None:
        return named
    above = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    above.mkdir(parents=True, exist_ok=True)
    return above / "sipipe"


def named_directory() -> Path | None:
    """The directory that the user names for kernels. Raises ConfigError: it begins with the home of a
    user who has none, such as ``~/kernels`` in a container whose user has no name."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise refused(Path(named), error) from None


def refused(named: Path, error: Exception) -> ConfigError:
    """Refusal of a named directory that cannot be taken, as one line."""
    why = str(error).rstrip(".")
    if isinstance(error, OSError):
        why = f"{error.filename}: {error.strerror}"
    return ConfigError(
        f"{VARIABLE} {named} cannot keep compiled kernels: {why}. Name a directory of this user "
        "alone, or leave it out"
    )


def check_named_directory() -> None:
    """Before anything starts. Raises ConfigError: the directory that the user names for kernels
    cannot be taken, whatever CPU this is."""
    if (named := named_directory()) is None:
        return
    try:
        kernels = private_directory(named, ["kernels"])
        if not os.access(kernels, os.W_OK) and not any(kernels.glob("*/*.nbi")):
            raise UnusableError(f"{kernels} cannot be written, and has no kernels in it")
    except (OSError, RuntimeError, UnusableError) as error:
        raise refused(named, error) from None
