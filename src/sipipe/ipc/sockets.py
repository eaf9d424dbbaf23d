"""A directory for the sockets of vLLM's front end, which leaves them when it is killed."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sipipe.errors import ConfigError

VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "sipipe-sockets-"


@contextmanager
def own_sockets() -> Iterator[None]:
    """Have vLLM, here and in processes started here, make its sockets in a directory of our own. It
    is removed at the end, and so are those of processes that were killed, whose locks are free."""
    if VARIABLE in os.environ:
        yield
        return
    remove_dead()
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_place()))
    with open(new / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait: none: nobody else knows the file
        # Named so that remove_dead() finds it only now that the lock is held.
        directory = new.rename(new.with_name(new.name[1:]))
        os.environ[VARIABLE] = str(directory)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            shutil.rmtree(directory, ignore_errors=True)


def free_path(path: str) -> None:
    """Remove the socket that a server has left at ``path``. ConfigError: one listens there, or none can."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
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
    """Where they are: /tmp if a socket's path, with its name of 36, would be longer than 107."""
    place = tempfile.gettempdir()
    behind = f"/.{PREFIX}12345678/{'-' * 36}"
    return place if len(os.fsencode(place + behind)) <= 107 else "/tmp"


def remove_dead() -> None:
    """Remove this user's directories whose process is gone."""
    for directory in Path(_place()).glob(f"{PREFIX}*"):
        # OSError: of another user, or gone, or its process lives (or has yet to make its lock).
        with suppress(OSError), ExitStack() as opened:
            ours = open_own(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, ours)
            lock = open_own("lock", os.O_RDWR | os.O_NOFOLLOW, ours)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)


def open_own(
    path: str | os.PathLike[str], flags: int = os.O_RDWR, directory: int | None = None
) -> int:
    """A descriptor, close-on-exec, of what another process of this user has made. Never waits, as opening a
    pipe would, and opens nothing of another user's, as root could. ``directory``: where a relative ``path``
    begins. Raises OSError: there is no such file, or (PermissionError) it is another user's."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, dir_fd=directory)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user's", os.fspath(path))
    return descriptor
