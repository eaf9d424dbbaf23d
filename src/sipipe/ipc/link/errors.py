"""What a transfer raises; every message names the link, the iteration and the way out."""

from sipipe.errors import SiPipeError, WorkerDiedError


class PeerDiedError(WorkerDiedError):
    """The process at the other end of a link ended, or its connection broke."""


class LinkClosedError(SiPipeError):
    """This end of the link, or the other one, was closed in good order."""


class TransferMismatchError(SiPipeError):
    """What arrived is not what the scheduling output announced; nothing of it is handed out."""
