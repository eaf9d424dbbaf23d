"""The record of one live request, which the tracker keeps and the balancer weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sipipe.messages.params import SequenceParams
from sipipe.messages.step import Added, int32_bytes

ON_DEVICE = -1
"""Value in place of a sampler's number: the last stage's device draws, and no sampler hears of it."""


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """One live request: its tokens, who draws for it, and its place in the last scheduling output."""

    handle: int
    """Its number in messages to samplers."""
    sampler: int
    """The sampler that draws for it, or :data:`ON_DEVICE`."""
    params: SequenceParams
    """Parameters that it asks of its sampler."""
    cost: float = 0.0
    """Seconds that one draw for it takes (:meth:`.Balancer.cost`)."""
    prompt: Sequence[int]
    """The scheduler's own list of prompt tokens, to which a streaming session adds."""
    prompt_length: int
    """Tokens of the prompt when the request was added here."""
    outputs: list[int] = field(default_factory=list)
    """Tokens that were drawn for it, in order; more than ``held`` while the last ones are new."""
    sent: int = 0
    """Number of ``outputs`` that its sampler has been sent."""
    scores: bool = False
    """The request asks for log-probabilities of its prompt."""
    prompt_logprobs: bool = False
    """Log-probabilities of its prompt are still to come."""
    iteration: int = -1
    """The last iteration that the request is in."""
    start: int = 0
    """Position of the first token that the stages compute for it in the last scheduling output."""
    held: int = 0
    """Output tokens that the scheduler held of it in the last scheduling output."""
    has_blocks: bool = True
    """False from a preemption until the request is scheduled again: its blocks may be another's."""
    error: str = ""
    """Why no sampler can draw for it; it fails with its next token."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens at positions ``start`` to ``stop`` of prompt and outputs."""
        length = self.prompt_length
        if start >= length:
            return self.outputs[start - length : stop - length]
        tokens = list(self.prompt[start:stop])
        if stop > length:
            tokens += self.outputs[: stop - length]
        return tokens

    def added(self) -> Added:
        """The message that gives its sampler the whole state; all outputs count as sent from then."""
        self.sent = len(self.outputs)
        if self.error:
            return Added(
                handle=self.handle,
                sampler=self.sampler,
                params=SequenceParams(),
                prompt=b"",
                error=self.error,
            )
        return Added(
            handle=self.handle,
            sampler=self.sampler,
            params=self.params,
            prompt=int32_bytes(self.prompt),
            outputs=int32_bytes(self.outputs),
        )
