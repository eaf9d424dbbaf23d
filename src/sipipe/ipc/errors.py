"""What goes wrong on a channel, each as one line that names the channel and the peer."""

from sipipe.errors import SiPipeError, StallError, WorkerDiedError


class ChannelError(SiPipeError):
    """Base of what a channel raises; the channel is unusable unless a subclass says otherwise."""


class ChannelClosed(ChannelError):  # noqa: N818 - an event, not always an error
    """The other side closed the channel in good order; every message before was delivered."""


class ChannelTimeout(ChannelError, StallError):  # noqa: N818 - an event, not always an error
    """A wait reached its bound. The channel stays usable, and the call may be made again.

    ``late`` names the peers that were waited for.
    """

    def __init__(self, message: str, late: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.late = late


class ChannelPeerDied(ChannelError, WorkerDiedError):  # noqa: N818 - an event, not always an error
    """A process at the other side went away without closing.

    For a producer or a receiver this is an event: the channel stays usable for the other peers.
    For a reader it is the end, after all complete messages were delivered.
    """
