"""What two stage workers are told of the link between them."""

import dataclasses
from typing import Literal

TransportKind = Literal["shm", "cuda_ipc", "zeromq"]

LEAST_TOKENS = 512
"""Of a buffer, whatever decodes: each piece of a prompt costs a hand-over (some 100 µs)."""


def buffer_tokens(sequences: int, tokens: int) -> int:
    """Tokens of a link's buffer, with so many sequences and so many tokens in a microbatch at most:
    what decodes crosses whole, long prompts in pieces."""
    return min(tokens, max(sequences, LEAST_TOKENS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkEndpoint:
    """One link, from rank r of a stage to rank r of the next. Pickles; holds no descriptor."""

    kind: TransportKind
    name: str = "link"
    """For messages, such as ``"stage0-1.r0"``."""
    buffer_tokens: int
    """Tokens of a buffer; a microbatch with more crosses in pieces (:func:`buffer_tokens`)."""
    depth: int = 3
    """Buffers: iterations that may be sent and not released; one is received as another is used."""
    stall_timeout: float = 300.0
    """Seconds that a wait takes at most where the call names no bound of its own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the later stage needs the tensors: in host memory, in place, or on its current GPU
    (with ``shm`` and ``zeromq`` by way of host memory)."""
    address: str = ""
    """Between hosts: the later stage's, where it listens."""
    port: int = 0
    token: str = ""
    """Between hosts: what lets the earlier stage in, where hidden states are not encrypted."""

    def __post_init__(self) -> None:
        assert self.buffer_tokens >= 1, self
        assert self.depth >= 2, self

    @property
    def transport(self) -> str:
        """The transport in a start-up line."""
        kind = f"{self.kind}, not encrypted" if self.token else self.kind
        return f"{kind} (untested between GPUs)" if self.device == "cuda" else kind

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"
