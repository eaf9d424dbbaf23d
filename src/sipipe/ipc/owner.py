"""Opens what other processes of this user have made, and nothing of another user's: root may open
everybody's, and a pipe or a device at which opening waits or does something."""

import errno
import os


def open_own(
    path: str | os.PathLike[str], flags: int = os.O_RDWR, directory: int | None = None
) -> int:
    """A descriptor, close-on-exec; never waits. ``directory``: where a relative ``path`` begins.
    Raises OSError: there is no such file, or (PermissionError) it is another user's."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, dir_fd=directory)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user's", os.fspath(path))
    return descriptor
