"""A directory for the sockets of vLLM's front end, which it would leave behind when it is killed."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sipipe.errors import ConfigError

VARIABLE = "VLLM_RPC_BASE_PATH"
"""Variable of vLLM's with the directory for its sockets."""
PREFIX = "sipipe-sockets-"
MAKING = 60.0
"""Seconds after which a directory that is still being made is one whose maker was killed."""


@contextmanager
def own_sockets() -> Iterator[None]:
    """Have vLLM, here and in processes started here, make its sockets in a directory of SiPipe's. It is
    removed at the end of the body. The directories of processes that were killed, whose locks are
    free, are removed before. A directory that the user has named is left as it is."""
    if VARIABLE in os.environ:
        yield
        return
    remove_dead()
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_place()))
    with open(new / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait: none: nobody else knows the file
        # `remove_dead` of another process finds it by this name, only now that the lock is held.
        directory = new.rename(new.with_name(new.name[1:]))
        os.environ[VARIABLE] = str(directory)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            shutil.rmtree(directory, ignore_errors=True)


def free_path(path: str) -> None:
    """Remove the socket that a dead server has left at ``path``. Raises ConfigError: a server listens
    there, or none can."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that is stopped takes no more connections at some time
        try:
            with suppress(BlockingIOError):
                probe.connect(path)
            raise ConfigError(f"--uds {path}: a server listens there")
        except FileNotFoundError:
            return
        except ConnectionRefusedError as error:
            if not Path(path).is_socket():
                raise ConfigError(f"--uds {path}: it is no socket") from error
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"--uds {path}: {error}") from error


def _place() -> str:
    """The temporary directory in which the directories are made. It is /tmp if the path of a socket,
    whose name has 36 characters, would be longer than the 107 bytes that the kernel takes."""
    place = tempfile.gettempdir()
    longest = f"{place}/.{PREFIX}12345678/{'-' * 36}"
    return place if len(os.fsencode(longest)) <= 107 else "/tmp"


def remove_dead() -> None:
    """Remove this user's directories of sockets whose process is gone, also those that were being made."""
    for directory in Path(_place()).glob(f".{PREFIX}*"):
        with suppress(OSError):
            # Between its two names a directory lives for a moment; a lock's file may be in it by then.
            if time.time() - directory.lstat().st_mtime > MAKING:
                descriptor = open_own(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
                os.close(descriptor)
                shutil.rmtree(directory, ignore_errors=True)
    for directory in Path(_place()).glob(f"{PREFIX}*"):
        # OSError: it is another user's, or is gone, or its process lives, or has yet to make its lock.
        with suppress(OSError), ExitStack() as stack:
            descriptor = open_own(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            lock = open_own("lock", os.O_RDWR | os.O_NOFOLLOW, descriptor)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)


def open_own(
    path: str | os.PathLike[str], flags: int = os.O_RDWR, directory: int | None = None
) -> int:
    """Open a file that another process of this user has made; returns a close-on-exec descriptor. It
    never waits, as opening a pipe would, and opens nothing of another user's, as root could.

    Args:
        path: the file; relative to ``directory`` if that is given.
        flags: those of ``os.open``.
        directory: descriptor of a directory.

    Raises OSError: there is no such file. PermissionError: it is another user's."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, dir_fd=directory)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user's", os.fspath(path))
    return descriptor
