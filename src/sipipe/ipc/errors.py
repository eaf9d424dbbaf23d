"""What goes wrong between processes, each as one line that names the channel or link and the peer. A
wait whose time is up is a :class:`sipipe.errors.StallError`."""

from sipipe.errors import SiPipeError, WorkerDiedError


class PeerDiedError(WorkerDiedError):
    """The process at the other side went away without closing, or the connection broke. Of a ring a
    reader hears it after all complete messages."""


class ChannelError(SiPipeError):
    """Base of what else a ring or the gather raises."""


class ChannelClosed(ChannelError):  # noqa: N818 - an event, not always an error
    """The other side closed the channel in good order; every message before was delivered."""


class LinkClosedError(SiPipeError):
    """This end of a link, or the other one, was closed in good order."""


class TransferMismatchError(SiPipeError):
    """What arrived is not what the scheduling output announced; nothing of it is handed out."""
