"""Work that one scheduling output asks of samplers and workers, and two lists that it is made from.

The tracker (:mod:`.requests`) fills :class:`StateChanges` and :class:`RowsToDraw` while it follows a
scheduling output. Both live for that one call; :class:`Work` is what the iteration keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sipipe.engine.iteration.tracked_request import TrackedRequest
from sipipe.messages.step import Added, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that one scheduling output asks of samplers and workers."""

    step: Step = field(default_factory=lambda: Step(-1))
    """The message to the samplers."""
    request_ids: list[str] = field(default_factory=list)
    """All requests of the iteration, in the order of the scheduling output."""
    sampled: list[str] = field(default_factory=list)
    """The request of each row of logits for samplers: as often as it has drafts, and once more."""
    on_device: list[str] = field(default_factory=list)
    """Requests that get a token of the last stage's device, in the order in which it reports them."""
    samplers: tuple[int, ...] = ()
    """The samplers that own a row, ascending."""
    prompt_logprobs: tuple[str, ...] = ()
    """Requests whose prompt log-probabilities are complete after this iteration."""

    @property
    def drawing(self) -> list[str]:
        """Requests of which a token is drawn, by whomever."""
        return [*dict.fromkeys(self.sampled), *self.on_device]


@dataclass(slots=True, kw_only=True)
class StateChanges:
    """Changes of the samplers' request states. A sampler applies the removals first, then the
    additions, then the tokens: so a request may be removed and added in one step."""

    removed: list[int]
    """Handles of requests that no sampler keeps any longer."""
    added: list[Added] = field(default_factory=list)
    """Whole states, each for one sampler."""
    appended: list[int] = field(default_factory=list)
    """Handles of requests that have one more output token; a handle comes once for each token."""
    tokens: list[int] = field(default_factory=list)
    """The tokens of ``appended``."""

    def replace(self, request: TrackedRequest) -> None:
        """Give the request's sampler its whole state again, in place of any other that has it."""
        self.removed.append(request.handle)
        self.added.append(request.added())

    def append(self, request: TrackedRequest) -> None:
        """Send the output tokens that the scheduler holds and the sampler does not."""
        self.appended += [request.handle] * (request.held - request.sent)
        self.tokens += request.outputs[request.sent : request.held]
        request.sent = request.held


@dataclass(slots=True)
class RowsToDraw:
    """The rows of logits of one iteration, and what else requests get from it."""

    request_ids: list[str] = field(default_factory=list)
    """The request of each row of logits for samplers."""
    requests: list[TrackedRequest] = field(default_factory=list)
    """The same, as the tracker keeps them."""
    follows: list[int] = field(default_factory=list)
    """The draft token that each row comes after; -1 for the first row of a request."""
    on_device: list[str] = field(default_factory=list)
    """Requests whose token the last stage's device draws."""
    prompt_logprobs: list[str] = field(default_factory=list)
    """Requests whose prompt log-probabilities are complete after this iteration."""

    def add(self, request_id: str, request: TrackedRequest, drafts: Sequence[int]) -> None:
        """One row for the request's next token, and one after each of its drafts."""
        self.request_ids.append(request_id)
        self.requests.append(request)
        self.follows.append(-1)
        for draft in drafts:
            self.request_ids.append(request_id)
            self.requests.append(request)
            self.follows.append(draft)
