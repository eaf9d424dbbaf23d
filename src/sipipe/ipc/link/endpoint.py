"""Making links: what the executor makes, hands to two workers, and they open.

A :class:`LinkEndpoint` is a small value that pickles anywhere. It holds no descriptor; the two
ends find each other by it, in whatever order they start.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from typing import Literal, get_args

from sipipe.errors import ConfigError, ResourceError, UnsupportedError
from sipipe.ipc.link.receiver import AllGather, Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.transport import ReceivingTransport, SendingTransport

__all__ = ["LinkEndpoint", "TransportKind", "create_link", "open_receiver", "open_sender"]

TransportKind = Literal["shm", "socket", "cuda_ipc", "nccl"]
_UNTESTED = frozenset({"cuda_ipc", "nccl"})
"""Written without a GPU to try them on: see docs/transfer.md."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkEndpoint:
    """One link, from rank r of a stage to rank r of the next."""

    kind: TransportKind
    name: str
    """For messages, such as ``"stage0-1.r0"``."""
    max_tokens: int
    """Most tokens of a microbatch, padding included."""
    depth: int
    """Buffers: iterations that may be sent and not yet released."""
    bytes_per_token_hint: int
    """Expected bytes a token of all tensors together; 0: unknown. Saves enlarging buffers."""
    shards: int
    """Tensor-parallel ranks that each send 1/shards of a tensor; 1: everything is sent whole."""
    shard: int
    """Which of them this link carries."""
    whole: frozenset[str]
    """Keys that are never sharded."""
    start_timeout: float
    """Seconds that one side waits for the other to start."""
    stall_timeout: float
    """Seconds that a wait takes at most where the call names no bound of its own."""
    device: Literal["cpu", "cuda"]
    """Where the later stage needs the tensors."""
    address: tuple[str, int]
    """Where the later stage listens, for transports over TCP; ``("", 0)`` for others."""
    secret: bytes = dataclasses.field(repr=False)
    """16 random bytes: how the ends find and recognize each other."""

    @property
    def transport(self) -> str:
        """The transport in a start-up line."""
        untested = self.kind in _UNTESTED or self.device == "cuda"
        return f"{self.kind} (untested on a GPU)" if untested else self.kind

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"


def create_link(
    kind: Literal["auto"] | TransportKind = "auto",
    *,
    max_tokens: int,
    bytes_per_token_hint: int = 0,
    depth: int = 3,
    name: str = "link",
    device: Literal["cpu", "cuda"] = "cpu",
    same_host: bool = True,
    address: tuple[str, int] | None = None,
    shards: int = 1,
    shard: int = 0,
    whole: frozenset[str] = frozenset(),
    start_timeout: float = 600.0,
    stall_timeout: float = 300.0,
) -> LinkEndpoint:
    """Describe a link; cheap, opens nothing.

    Args:
        kind: ``"auto"``: ``"shm"`` on one host and ``"socket"`` between hosts, or ``"cuda_ipc"``
            and ``"nccl"`` where ``device`` is ``"cuda"``.
        max_tokens: most tokens of a microbatch, padding included.
        bytes_per_token_hint: expected bytes a token of all tensors; saves enlarging buffers when
            a later structure is larger than the first.
        depth: at least 2, so that one iteration is received while another is used.
        name: for messages.
        device: where the later stage needs the tensors. ``"cpu"``: in host memory, in place.
            ``"cuda"``: on its current GPU; with ``shm`` and ``socket`` by way of host memory.
        same_host: whether both stages run on one host.
        address: host and port where the later stage listens (``socket``, ``nccl``). None: a free
            port of the loopback interface, where ``same_host``.
        shards, shard: see :class:`LinkEndpoint`; worth it where the network between stages is
            slower than the one between tensor-parallel ranks, never for ``shm``.
        whole: keys that are never sharded, because their values differ between ranks.
        start_timeout: seconds that one side waits for the other to start.
        stall_timeout: seconds that any other wait takes at most.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedError: the transport is not available here.
    """
    if kind == "auto":
        if device == "cuda":
            chosen: TransportKind = "cuda_ipc" if same_host else "nccl"
        else:
            chosen = "shm" if same_host else "socket"
    elif kind in get_args(TransportKind):
        chosen = kind
    else:
        raise ConfigError(f"transport={kind!r}: choose auto, shm, socket, cuda_ipc or nccl")
    if chosen in _UNTESTED and device != "cuda":
        raise UnsupportedError(
            f"link {name}: transport={chosen!r} joins stages on CUDA devices; use "
            "transport='auto' here"
        )
    over_tcp = chosen in ("socket", "nccl")
    if not over_tcp and not same_host:
        raise ConfigError(f"link {name}: transport={chosen!r} needs both stages on one host")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be 1 or more")
    if depth < 2:
        raise ConfigError(f"depth={depth}: must be 2 or more")
    if not 0 <= shard < shards:
        raise ConfigError(f"shard={shard} of shards={shards}: must be 0 to {shards - 1}")
    if not over_tcp:
        address = ("", 0)
    elif address is None:
        if not same_host:
            raise ConfigError(
                f"link {name}: transport={chosen!r} between hosts needs the address and a port of "
                "the later stage's host"
            )
        address = ("127.0.0.1", _free_port())
    return LinkEndpoint(
        kind=chosen,
        name=name,
        max_tokens=max_tokens,
        depth=depth,
        bytes_per_token_hint=bytes_per_token_hint,
        shards=shards,
        shard=shard,
        whole=whole,
        start_timeout=start_timeout,
        stall_timeout=stall_timeout,
        device=device,
        address=address,
        secret=secrets.token_bytes(16),
    )


_given_ports: set[int] = set()


def _free_port() -> int:
    """A loopback port below the range from which outgoing connections get theirs.

    The receiver binds it minutes later, so nothing that merely connects may take it meanwhile.
    """
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_ports.add(port)
        return port
    raise ResourceError("no free TCP port between 20000 and 32000 on the loopback interface")


def open_sender(endpoint: LinkEndpoint) -> Sender:
    """Open the sending end, in the process of the earlier stage; does not wait for the other."""
    transport: SendingTransport
    if endpoint.kind == "shm":
        from sipipe.ipc.link.shm import ShmSending

        transport = ShmSending(endpoint)
    elif endpoint.kind == "socket":
        from sipipe.ipc.link.tcp import TcpSending

        transport = TcpSending(endpoint)
    elif endpoint.kind == "cuda_ipc":
        from sipipe.ipc.link.cuda_ipc import CudaIpcSending

        transport = CudaIpcSending(endpoint)
    else:
        from sipipe.ipc.link.nccl import NcclSending

        transport = NcclSending(endpoint)
    return Sender(endpoint, transport)


def open_receiver(endpoint: LinkEndpoint, *, all_gather: AllGather | None = None) -> Receiver:
    """Open the receiving end, in the process of the later stage; does not wait for the other.

    Args:
        all_gather: for links with ``shards`` > 1: takes this rank's flat part [n] and returns
            all ranks' parts in order of rank, [shards · n].
    """
    transport: ReceivingTransport
    if endpoint.kind == "shm":
        from sipipe.ipc.link.shm import ShmReceiving

        transport = ShmReceiving(endpoint)
    elif endpoint.kind == "socket":
        from sipipe.ipc.link.tcp_receiving import TcpReceiving

        transport = TcpReceiving(endpoint)
    elif endpoint.kind == "cuda_ipc":
        from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving

        transport = CudaIpcReceiving(endpoint)
    else:
        from sipipe.ipc.link.nccl import NcclReceiving

        transport = NcclReceiving(endpoint)
    return Receiver(endpoint, transport, all_gather)
