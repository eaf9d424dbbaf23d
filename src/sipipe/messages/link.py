"""What two stage workers are told of the link between them."""

import dataclasses
from typing import Literal

TransportKind = Literal["shm", "cuda_ipc", "zeromq"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkEndpoint:
    """One link, from rank r of a stage to rank r of the next. Pickles; holds no descriptor."""

    kind: TransportKind
    name: str
    """For messages, such as ``"stage0-1.r0"``."""
    max_tokens: int
    """Most tokens of a microbatch, padding included."""
    depth: int
    """Buffers: frames that may be sent and not yet released."""
    stall_timeout: float
    """Seconds that a wait takes at most where the call names no bound of its own."""
    device: Literal["cpu", "cuda"]
    """Where the later stage needs the tensors."""
    address: str = ""
    """Between hosts: the later stage's, where it listens."""
    port: int = 0

    @property
    def transport(self) -> str:
        """The transport in a start-up line."""
        return f"{self.kind} (untested on a GPU)" if self.device == "cuda" else self.kind

    def describe(self) -> str:
        """The link in a message."""
        return f"link {self.name} ({self.kind})"
