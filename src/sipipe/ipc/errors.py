"""What goes wrong on a channel, each as one line that names the channel and the peer."""

from sipipe.errors import SiPipeError, StallError, WorkerDiedError


class ChannelError(SiPipeError):
    """Base of what a channel raises; the channel is unusable unless a subclass says otherwise."""


class ChannelClosed(ChannelError):  # noqa: N818 - an event, not always an error
    """The other side closed the channel in good order; every message before was delivered."""


class ChannelTimeout(ChannelError, StallError):  # noqa: N818 - an event, not always an error
    """A wait for ``late`` peers reached its bound; the call may be made again."""

    def __init__(self, message: str, late: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.late = late


class ChannelPeerDied(ChannelError, WorkerDiedError):  # noqa: N818 - an event, not always an error
    """A process at the other side went away without closing: for a reader the end, after all
    complete messages; for a producer or a receiver an event, others stay."""
