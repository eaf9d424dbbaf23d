"""Buffered IPC channels: dispatch rings, logits slots and the gather ring (paper, section 5)."""

from sipipe.channels.dispatch import DispatchProducer
from sipipe.channels.dispatch_reader import DispatchReader
from sipipe.channels.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.channels.gather import GatherReceiver
from sipipe.channels.gather_sender import GatherSender
from sipipe.channels.gather_slots import Gathered
from sipipe.channels.layout import required_bytes
from sipipe.channels.logits import LogitsChannel, LogitsReader, LogitsSlot, LogitsWriter
from sipipe.channels.logits_shape import LogitsShape
from sipipe.channels.memory import Endpoint, check_room
from sipipe.channels.message import Message
from sipipe.channels.relay import serve_replica, serve_source
from sipipe.channels.relay_frames import RelayEndpoint
from sipipe.channels.relay_replica import RelayReplica
from sipipe.channels.relay_source import RelaySource
from sipipe.channels.sockets import SocketEndpoint
from sipipe.channels.statistics import ChannelStatistics

__all__ = [
    "ChannelClosed",
    "ChannelError",
    "ChannelPeerDied",
    "ChannelStatistics",
    "ChannelTimeout",
    "DispatchProducer",
    "DispatchReader",
    "Endpoint",
    "GatherReceiver",
    "GatherSender",
    "Gathered",
    "LogitsChannel",
    "LogitsReader",
    "LogitsShape",
    "LogitsSlot",
    "LogitsWriter",
    "Message",
    "RelayEndpoint",
    "RelayReplica",
    "RelaySource",
    "SocketEndpoint",
    "check_room",
    "required_bytes",
    "serve_replica",
    "serve_source",
]
