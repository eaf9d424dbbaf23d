"""Making links: what the executor makes, hands to two workers, and they open.

A :class:`LinkEndpoint` is a small value that pickles anywhere. It holds no descriptor; the two
ends find each other by it, in whatever order they start.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Literal

from sipipe.errors import ConfigError, UnsupportedError
from sipipe.transfer.receiver import AllGather, Receiver
from sipipe.transfer.sender import Sender

if TYPE_CHECKING:
    import torch

__all__ = ["LinkEndpoint", "TransportKind", "create_link", "open_receiver", "open_sender"]

TransportKind = Literal["shm", "socket", "cuda_ipc", "nccl"]
_DEVICES = {"shm": "cpu", "socket": "cpu", "cuda_ipc": "cuda", "nccl": "cuda"}


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
    secret: bytes = dataclasses.field(repr=False)
    """16 random bytes: how the ends find and recognize each other."""

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"

    def check_device(self, key: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor that this kind of link cannot carry."""
        if tensor.device.type != _DEVICES[self.kind]:
            raise UnsupportedError(
                f"{self.describe()} carries {_DEVICES[self.kind]} tensors and {key!r} is on "
                f"{tensor.device}; choose another transport"
            )


def create_link(
    kind: Literal["auto"] | TransportKind = "auto",
    *,
    max_tokens: int,
    bytes_per_token_hint: int = 0,
    depth: int = 3,
    name: str = "link",
    device: Literal["cpu", "cuda"] = "cpu",
    same_host: bool = True,
    shards: int = 1,
    shard: int = 0,
    whole: frozenset[str] = frozenset(),
    start_timeout: float = 600.0,
    stall_timeout: float = 300.0,
) -> LinkEndpoint:
    """Describe a link; cheap, opens nothing.

    Args:
        kind: ``"auto"`` chooses by ``device`` and ``same_host``.
        depth: at least 2, so that one iteration is received while another is used.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedError: the transport is not available here.
    """
    if kind == "auto":
        chosen: TransportKind
        if device == "cpu":
            chosen = "shm" if same_host else "socket"
        else:
            chosen = "cuda_ipc" if same_host else "nccl"
    elif kind in _DEVICES:
        chosen = kind
    else:
        raise ConfigError(f"transport={kind!r}: choose auto, {', '.join(_DEVICES)}")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be 1 or more")
    if depth < 2:
        raise ConfigError(f"depth={depth}: must be 2 or more")
    if not 0 <= shard < shards:
        raise ConfigError(f"shard={shard} of shards={shards}: must be 0 to {shards - 1}")
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
        secret=secrets.token_bytes(16),
    )


def open_sender(endpoint: LinkEndpoint) -> Sender:
    """Open the sending end, in the process of the earlier stage; does not wait for the other."""
    if endpoint.kind == "shm":
        from sipipe.transfer.shm import ShmSending

        return Sender(endpoint, ShmSending(endpoint))
    raise _unsupported(endpoint)


def open_receiver(endpoint: LinkEndpoint, *, all_gather: AllGather | None = None) -> Receiver:
    """Open the receiving end, in the process of the later stage; does not wait for the other.

    Args:
        all_gather: for links with ``shards`` > 1: takes this rank's flat part [n] and returns
            all ranks' parts in order of rank, [shards · n].
    """
    if endpoint.kind == "shm":
        from sipipe.transfer.shm import ShmReceiving

        return Receiver(endpoint, ShmReceiving(endpoint), all_gather)
    raise _unsupported(endpoint)


def _unsupported(endpoint: LinkEndpoint) -> UnsupportedError:
    return UnsupportedError(f"{endpoint.describe()}: this transport is not available yet")
