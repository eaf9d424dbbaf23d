"""Structure-aware transmission of hidden states between pipeline stages (paper, section 4.3)."""

from sipipe.transfer.endpoint import LinkEndpoint, create_link, open_receiver, open_sender
from sipipe.transfer.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.transfer.receiver import Receiver
from sipipe.transfer.sender import Sender
from sipipe.transfer.statistics import ReceiverStatistics, SenderStatistics

__all__ = [
    "LinkClosedError",
    "LinkEndpoint",
    "PeerDiedError",
    "Receiver",
    "ReceiverStatistics",
    "Sender",
    "SenderStatistics",
    "TransferMismatchError",
    "create_link",
    "open_receiver",
    "open_sender",
]
