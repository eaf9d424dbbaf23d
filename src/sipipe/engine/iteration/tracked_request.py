"""The record of one live request, which the tracker keeps and the balancer weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sipipe.messages.params import SequenceParams
from sipipe.messages.step import Added, int32_bytes

ON_DEVICE = -1
"""In place of a sampler's number: the last stage's device draws, and no sampler hears of it."""


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """One live request. ``outputs`` are the tokens that the scheduler holds, in order."""

    handle: int
    sampler: int
    params: SequenceParams
    cost: float = 0.0
    """Of drawing for it once, in seconds (:meth:`.Balancer.cost`)."""
    prompt: Sequence[int]
    prompt_length: int
    """How long it was when it came: the scheduler's own list, to which a streaming session adds."""
    outputs: list[int] = field(default_factory=list)
    sent: int = 0
    """How many of ``outputs`` the sampler has been sent."""
    scores: bool = False
    """Whether it asks for log-probabilities of its prompt ..."""
    prompt_logprobs: bool = False
    """... and they are still to come."""
    iteration: int = -1
    """The last iteration that the request is in."""
    error: str = ""
    """Why no sampler can draw for it; it fails with its next token."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def added(self) -> Added:
        self.sent = len(self.outputs)
        if self.error:
            return Added(self.handle, self.sampler, SequenceParams(), b"", error=self.error)
        tokens = int32_bytes(self.prompt), int32_bytes(self.outputs)
        return Added(self.handle, self.sampler, self.params, *tokens)
