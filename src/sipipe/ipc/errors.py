"""Errors between processes. Each message is one line that names the channel or link and the peer.

A wait whose time is up raises :class:`sipipe.errors.StallError`.
"""

from sipipe.errors import SiPipeError, WorkerDiedError


class PeerDiedError(WorkerDiedError):
    """The process at the other side went away without closing, or the connection broke. The reader of
    a ring gets it after all complete messages."""


class ChannelError(SiPipeError):
    """Base of the errors that only a ring or the gather raises."""


class ChannelClosed(ChannelError):  # noqa: N818 - an event, not always an error
    """The other side closed the channel in good order; every message before was delivered."""


class LinkClosedError(SiPipeError):
    """This end of a link, or the other one, was closed in good order."""


class TransferMismatchError(SiPipeError):
    """A message that arrived is not the one that the scheduling output announced. Nothing of it is
    handed out."""
