"""Description of a link between two stage workers, which both ends get from the engine."""

import dataclasses
from typing import Literal

TransportKind = Literal["shm", "cuda_ipc", "zeromq", "nixl"]
DeviceKind = Literal["cpu", "cuda"]
NixlReach = Literal["", "tcp", "rdma"]
"""Way by which NIXL reaches other hosts; empty: it is not installed."""

Pair = tuple[int, int]
"""The ranks that a link joins: the sender's, then the receiver's."""

TRIAL_SECONDS = 30.0
"""Seconds that the trial of a link may take where another transport can take its place."""

LEAST_TOKENS = 512
"""Tokens that a link's buffer has at least, however few sequences decode: each piece of a prompt
costs a hand-over of some 100 µs."""


def transports(asked: str, device: DeviceKind) -> tuple[TransportKind, ...]:
    """Transports between two processes of one host, in the order in which they are tried.

    Args:
        asked: the setting ``transport``.
        device: where the stages compute.
    """
    match asked:
        case "shm" | "cuda_ipc":
            return (asked,)
        case _:
            return ("cuda_ipc", "shm") if device == "cuda" else ("shm",)


def buffer_tokens(sequences: int, tokens: int) -> int:
    """Tokens that a link's buffer has room for: decodes cross whole, long prompts in pieces.

    Args:
        sequences: sequences of a microbatch at most.
        tokens: tokens of a microbatch at most.
    """
    return min(tokens, max(sequences, LEAST_TOKENS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkEndpoint:
    """One link, from rank r of a stage to rank r of the next. Pickles; holds no descriptor."""

    kind: TransportKind
    name: str = "link"
    """Name in messages, such as ``"stage0-1.r0"``."""
    buffer_tokens: int
    """Tokens that a buffer has room for; a microbatch with more crosses in pieces."""
    depth: int = 3
    """Number of buffers, and so of iterations that may be sent and not yet released. Two at least: one
    is received while another is used."""
    stall_timeout: float = 300.0
    """Seconds that a wait takes at most where the call names no bound of its own."""
    device: DeviceKind = "cpu"
    """Memory in which the later stage needs the tensors: the host's, where they are used in place, or
    its current GPU's, which all transports but ``cuda_ipc`` reach by way of host memory."""
    address: str = ""
    """Address on which the later stage listens, between hosts; empty within a host."""
    port: int = 0
    """TCP port on which it listens."""
    data_port: int = 0
    """TCP port on which NIXL listens there; 0: it goes by RDMA, or another transport is used."""
    token: str = ""
    """Secret that lets the earlier stage in where hidden states are not encrypted; else empty."""

    def __post_init__(self) -> None:
        assert self.buffer_tokens >= 1, self
        assert self.depth >= 2, self

    @property
    def by_host(self) -> bool:
        """True where a GPU's hidden states go by way of host memory."""
        return self.device == "cuda" and self.kind != "cuda_ipc"

    @property
    def transport(self) -> str:
        """The transport in a start-up line."""
        plain = bool(self.token) or self.kind == "nixl"
        kind = f"{self.kind}, not encrypted" if plain else self.kind
        return f"{kind} (untested between GPUs)" if self.device == "cuda" else kind

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkTrial:
    """An order to both ends of a link: open it and try it, before it carries an iteration."""

    pair: Pair
    endpoint: LinkEndpoint
    tensors: bytes
    """Schema of the hidden states that the later stage takes, encoded as links announce it."""
    seconds: float = TRIAL_SECONDS
    """Seconds after which an end that has not finished counts as one that hangs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Report of one end of a link about its trial."""

    pair: Pair
    failure: str = ""
    """Reason of the failure, in one line; empty: the trial was good."""
    echoes: bool = False
    """True where this end failed only because the other one left, which says more."""
    hangs: bool = False
    """True where something has not come back, so that closing the end might not come back either."""
    seconds: float = 0.0
    """Time from sending a full buffer to having it back, measured by the sender."""
