"""Description of a link between two stage workers, which both ends get from the engine."""

import dataclasses
from typing import Literal

TransportKind = Literal["shm", "cuda_ipc", "zeromq"]

LEAST_TOKENS = 512
"""Tokens that a link's buffer has at least, however few sequences decode: each piece of a prompt
costs a hand-over of some 100 µs."""


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
    device: Literal["cpu", "cuda"] = "cpu"
    """Memory in which the later stage needs the tensors: the host's, where they are used in place, or
    its current GPU's, which ``shm`` and ``zeromq`` reach by way of host memory."""
    address: str = ""
    """Address on which the later stage listens, between hosts; empty within a host."""
    port: int = 0
    """TCP port on which it listens."""
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
        kind = f"{self.kind}, not encrypted" if self.token else self.kind
        return f"{kind} (untested between GPUs)" if self.device == "cuda" else kind

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"
