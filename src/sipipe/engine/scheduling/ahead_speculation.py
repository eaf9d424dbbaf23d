"""Drafts in an engine that schedules ahead of the tokens: the one or the other, whatever gains more.

A draft stands behind a token that has to be known when the draft is scheduled, and a microbatch that is
scheduled ahead is made before that. So a slot's turn either waits for its tokens, and may verify drafts,
or comes too early for them. Which of the two is better follows from what drafts gain, and that is known
in both cases: samplers propose all the time, and drafts that were overtaken are compared with the
tokens that came in their place. What waiting costs is measured (:mod:`.draft_pace`).

Rejected: never to schedule ahead where drafts may come. With 32 requests at once, two stages and text that
repeats little, such an engine made 3 to 5 % fewer tokens than one without drafts, though hardly a draft
was verified (docs/log.md).
Rejected: to schedule ahead as if all drafts were right, as vLLM does where they stay on the device. The
stages would have to be told afterwards where each sequence goes on.

Who runs here: the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sipipe.engine.scheduling.speculation import RATE, WAITING, Speculation, pays

if TYPE_CHECKING:
    from sipipe.engine.iteration.iteration import Iteration
    from sipipe.engine.scheduling.concurrency import ConcurrencyController


@dataclass(slots=True)
class _Overtaken:
    """Drafts of a request that came when its next pass was scheduled."""

    tokens: list[int]
    right: int = 0
    """Number of them that were right so far: the first ones."""


class _Compared(NamedTuple):
    """Drafts of which it is known if they were right, and those that were."""

    drafts: int = 0
    right: int = 0


class AheadSpeculation(Speculation):
    """Decoding with drafts of samplers, where slots wait for them as long as they gain more than
    scheduling ahead does."""

    def __init__(
        self, scheduler: Any, controller: ConcurrencyController | None, target: float = 0.0
    ) -> None:
        super().__init__(scheduler, controller, target)
        self._gain = 2 * WAITING
        """Tokens that drafts bring for each one that a pass draws without them, lately, less the time
        that their rows cost. Nothing is known at first, and slots wait."""
        self._right = 0.0
        """Tokens that drafts bring for each one that a pass draws without them, lately."""
        self._overtaken: dict[str, _Overtaken] = {}

    def _fit(self) -> bool:
        running = len(self._scheduler.running)
        slowdown = self._pace.slowdown(running)
        drafting = self._scheduler.waits_for_drafts
        if slowdown is None:
            waits = pays(1.0 + self._gain, 1.0 + WAITING, drafting=drafting)
        else:  # what rows cost is in it, too
            waits = pays(1.0 + self._right, slowdown, drafting=drafting)
        if waits and self._pace.tries(running, 1.0 + self._right):
            waits = False
        self._scheduler.waits_for_drafts = waits
        if not waits:
            # Some may be there: of tokens that a slot has waited for, or that were not overtaken.
            for request in self._scheduler.running:
                request.spec_token_ids = []
        return super()._fit()

    def _take(self, iteration: Iteration) -> None:
        super()._take(iteration)
        drawn = iteration.outcome.drawn
        if not drawn:
            return
        self._follow_pace(iteration, drafting=self._scheduler.waits_for_drafts)
        verified = iteration.output.scheduled_spec_decode_tokens
        drafts = 0
        right = 0
        for name, tokens in drawn.items():
            if name in verified:
                self._overtaken.pop(name, None)
                drafts += len(verified[name])
                right += tokens - 1
            else:
                compared = self._compare(name, iteration.outcome.drafts.get(name, ()))
                drafts += compared.drafts
                right += compared.right
        # Less the time of their rows.
        gained = right - drafts * self._scheduler.tracker.worth
        self._gain += RATE * (gained / len(drawn) - self._gain)
        self._right += RATE * (right / len(drawn) - self._right)

    def _compare(self, name: str, proposed: Iterable[int]) -> _Compared:
        """Compare a request's overtaken drafts with the token that it has got, and follow those that are
        ``proposed`` behind it, where none are.

        Returns those that are known now: one after the other, and behind one that was wrong all others.
        Passes with drafts would have made fewer proposals: those that come while others are
        compared are left out.
        """
        request = self._scheduler.requests.get(name)
        overtaken = self._overtaken.pop(name, None)
        if request is None or not request.num_output_tokens:
            return _Compared()
        if overtaken is None:
            tokens = list(proposed)
            if tokens and not self._scheduler.waits_for_drafts:
                self._keep(name, _Overtaken(tokens))
            return _Compared()
        if request.output_token_ids[-1] != overtaken.tokens[overtaken.right]:
            return _Compared(drafts=len(overtaken.tokens) - overtaken.right)
        overtaken.right += 1
        if overtaken.right < len(overtaken.tokens):
            self._keep(name, overtaken)
        return _Compared(drafts=1, right=1)

    def _keep(self, name: str, overtaken: _Overtaken) -> None:
        self._overtaken[name] = overtaken
        if len(self._overtaken) > self._scheduler.max_num_running_reqs:  # some have left
            requests = self._scheduler.requests
            self._overtaken = {key: it for key, it in self._overtaken.items() if key in requests}
