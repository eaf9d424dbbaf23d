"""Speculative decoding: how many drafts the next microbatch verifies, if any.

Samplers propose drafts (:mod:`sipipe.sampler.drafts`) with the tokens that they stand behind. They
are in before the request's next turn, because a request is in one iteration at a time, so drafts go
to all stages with the scheduling output, and nothing is corrected afterwards. The samplers draw at
each draft's position what they would have drawn there, and stop at the first that differs.

A draft is worth its row where it is likely enough: the row costs a share of the pass (the stage times
that are measured anyway), a token that comes with it is worth as much as one of the pass's others. So
speculation fades as the batch fills, and where nothing repeats. Tokens that a grammar forces are left
out too where drafts were not right often enough. Rows of all iterations in flight stay within BIC-L's,
and no drafts are taken while the KV cache runs out.

Drafts of a head on the last stage (:class:`HeadSpeculation`) come a little later than the tokens. The
scheduler waits for them when it makes the slot's next microbatch: clients have the tokens by then. The
head's own passes count as a draft's row does. Where vLLM's own sampler draws, the head proposes in the
same pass: drafts come with the tokens, and its passes are in the stage's time.

All of it only saves time: where a part fails, requests have no drafts this time
(:mod:`sipipe.best_effort`).

Who runs here: the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from sipipe.best_effort import BestEffort
from sipipe.engine.scheduling.draft_pace import DraftPace
from sipipe.engine.scheduling.forced import ForcedTokens
from sipipe.observe.live import Word

if TYPE_CHECKING:
    from sipipe.engine.iteration.iteration import Iteration
    from sipipe.engine.scheduling.concurrency import ConcurrencyController

UNKNOWN_PRICE = 0.1
"""Price of a row, as a part of a period, until batches of different sizes have told it."""
LEAST_WORTH = 0.05
"""Probability that a draft needs at least, however little a row costs: prices err."""
MARGIN = 1.25
"""Factor by which a draft has to be likelier than its price says, for the same reason."""
LOSS = 0.005
"""Part of its time that an engine may lose by trying drafts again that were not worth it. A try that
fails takes :data:`RATE` of a draft's chance, which is then about its price, and comes back in steps of
``RATE * LOSS``: so tries are ``LOSS / price`` of the microbatches, and each costs the price."""
RATE = 0.05
"""Weight of the last microbatch in the means of what its requests got."""
WAITING = 0.03
"""Tokens, of each one, that a pipeline is taken to lose where its slots wait for their tokens, until it is
measured (:mod:`.draft_pace`). Engines that waited and verified hardly a draft made 0.03 to 0.05 fewer
(docs/log.md)."""
BAND = 0.01
"""Share by which tokens with drafts have to be more than those without before drafts begin, or fewer before
they cease."""
KV_RESERVE = 0.05
"""Share of the KV cache that has to be free: a draft must not cost another request its place."""


class NoSpeculation:
    """Decoding without drafts: requests get a token in each of their turns."""

    asks = 0
    """Drafts that a head is to propose behind the tokens of the next microbatch."""

    def fit(self) -> None:
        """Prepare for a microbatch, which is scheduled next."""

    def take(self, iteration: Iteration) -> None:
        """Learn from ``iteration``, whose tokens the scheduler has taken."""


class Speculation(NoSpeculation):
    """Decoding with drafts that samplers propose, and tokens that grammars force.

    Args:
        scheduler: The engine's ``ObservedScheduler``.
        controller: Knows the stages' times; None where nothing does.
        target: Seconds that a period may take, rows of drafts included; 0: any.
    """

    def __init__(
        self, scheduler: Any, controller: ConcurrencyController | None, target: float = 0.0
    ) -> None:
        self._scheduler = scheduler
        self._controller = controller
        self._target = target
        self._live = scheduler.telemetry.live
        self._rows = scheduler.rows
        # No drafts for a batch of any size: vLLM then pads no request with drafts that nobody has
        # proposed, and counts none of a pass before there are any.
        scheduler.dynamic_sd_lookup = [0] * (scheduler.max_num_running_reqs + 1)
        self._forced = ForcedTokens(scheduler.structured_output_manager)
        self._fitting = BestEffort("fitting drafts into the next microbatch", bounded=False)
        self._taking = BestEffort("taking drafts in", bounded=False)
        self._forcing = BestEffort("finding the tokens that a grammar forces")
        self._price: float | None = None
        """Share of a period that one more row in each microbatch costs; None: not known yet."""
        self._tokens_a_pass = 1.0
        """Tokens of a request in a pass, lately."""
        self._accepted = 1.0
        """Part of the drafts that was accepted, lately."""
        self._pace = DraftPace(1 if controller is None else controller.slots)

    def fit(self) -> None:
        """Cut the drafts of running requests to those that the next microbatch is to verify, and tell
        the samplers how likely new ones have to be."""
        if not self._fitting(False, self._fit):
            # Drafts that nobody has counted could have more rows than BIC-L.
            for request in self._scheduler.running:
                request.spec_token_ids = []
            self._scheduler.tracker.worth = 1.0

    def _fit(self) -> bool:
        """Do the work of :meth:`fit`; True: it is done."""
        formed = max(self._controller.formed, 1) if self._controller is not None else 1
        sequences = max(1.0, len(self._scheduler.running) / formed)
        room = self._room(sequences, formed)
        self._cut_drafts(room)
        self._price = None if self._controller is None else self._controller.price(sequences)
        price = UNKNOWN_PRICE if self._price is None else self._price * MARGIN
        # A row costs that part of the period, in which the microbatch's requests get their tokens.
        worth = price * sequences * self._tokens_a_pass
        self._scheduler.tracker.worth = max(worth, LEAST_WORTH) if room > 0 else 1.0
        return True

    def _room(self, sequences: float, formed: int) -> int:
        """Drafts that the next microbatch has room for.

        Args:
            sequences: Sequences of a microbatch, on average.
            formed: Microbatches that they form.
        """
        scheduler = self._scheduler
        if scheduler.kv_free() < KV_RESERVE:
            return 0
        # Each request may need a row of its own by then.
        requests = min(sum(scheduler.get_request_counts()), scheduler.max_num_running_reqs)
        room: int = min(self._rows, scheduler.max_num_scheduled_tokens)
        room -= requests + scheduler.iterations.drafts()
        if self._controller is not None and self._target:
            most = self._controller.within(self._target, math.ceil(sequences) + room)
            room = min(room, max(0, int(formed * (most - sequences))))
        return room

    def _cut_drafts(self, room: int) -> None:
        """Cut running requests' drafts to what they may still get, and level them to ``room`` in all."""
        drafting = [request for request in self._scheduler.running if request.spec_token_ids]
        for request in drafting:
            remaining = request.max_tokens - request.num_output_tokens - 1
            request.spec_token_ids = request.spec_token_ids[: max(remaining, 0)]
        most = _level([len(request.spec_token_ids) for request in drafting], room)
        for request in drafting:
            request.spec_token_ids = request.spec_token_ids[:most]

    def take(self, iteration: Iteration) -> None:
        """Count the drafts that ``iteration`` verified, and hand the scheduler those it brought."""
        self._taking(None, self._take, iteration)

    def _take(self, iteration: Iteration) -> None:
        self._count(iteration)
        drafts = iteration.outcome.drafts
        if iteration.work.step.grammar and self._accepted > self._scheduler.tracker.worth:
            drafts.update(self._forced_tokens(iteration))
        self._hand_on(iteration.number, drafts)

    def _follow_pace(self, iteration: Iteration, *, drafting: bool) -> None:
        """Measure periods by ``iteration``, which came back while drafts were made and waited for, or were
        not (``drafting``)."""
        self._pace.took(
            drafting,
            len(iteration.outcome.drawn),
            len(self._scheduler.running),
            prompts=iteration.scheduled.load.tokens > 0,
        )

    def _count(self, iteration: Iteration) -> None:
        """Count the drafts that ``iteration`` verified, in the figures and in the means."""
        drawing = len(iteration.work.drawing)
        if not drawing:
            return
        drafts = iteration.output.scheduled_spec_decode_tokens
        drawn = sum(iteration.outcome.drawn.values())
        offered = sum(map(len, drafts.values()))
        requests = len(iteration.outcome.drawn)
        accepted = drawn - requests
        if requests > 0:
            self._tokens_a_pass += RATE * (drawn / requests - self._tokens_a_pass)
        if self._controller is not None:
            rows_a_request = (drawing + offered) / drawing
            self._controller.rows += RATE * (rows_a_request - self._controller.rows)
        if offered:
            self._accepted += RATE * (accepted / offered - self._accepted)
        self._live.add(Word.DRAFTS, offered)
        self._live.add(Word.ACCEPTED, accepted)
        self._live.add(Word.DRAFTED, len(drafts))

    def _forced_tokens(self, iteration: Iteration) -> dict[str, list[int]]:
        """The tokens that grammars leave no choice in, of the requests that ``iteration`` sampled."""
        forced: dict[str, list[int]] = {}
        for request_id in iteration.work.drawing:
            request = self._scheduler.requests.get(request_id)
            if request is None:
                continue
            most = self._scheduler.num_spec_tokens
            tokens = self._forcing([], self._forced.of, request, most)
            if tokens:
                forced[request_id] = tokens
        return forced

    def _hand_on(self, number: int, drafts: Mapping[str, list[int]]) -> None:
        """Hand the scheduler drafts that iteration ``number`` brought, by request. One that was
        preempted may be in another iteration by now, whose token comes first: it gets none."""
        drafts = {name: tokens for name, tokens in drafts.items() if self._is_next(name, number)}
        if drafts:
            self._scheduler.update_draft_token_ids(
                DraftTokenIds(req_ids=list(drafts), draft_token_ids=list(drafts.values()))
            )

    def _is_next(self, request_id: str, number: int) -> bool:
        """Say if the tokens of iteration ``number`` are the last that the request has."""
        request: Request | None = self._scheduler.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return False
        if request.num_output_placeholders:  # it is scheduled once more, ahead of these tokens
            return False
        return bool(self._scheduler.tracker.is_last(number, request_id))


class HeadSpeculation(Speculation):
    """Decoding with drafts of a head, which come after the tokens that they stand behind: they are
    waited for when the scheduler has handed the tokens on and makes the next microbatch.

    As long as no drafts are worth it, none are asked for, and microbatches may be scheduled ahead of the
    tokens, as without a head.
    """

    def __init__(
        self, scheduler: Any, controller: ConcurrencyController | None, target: float = 0.0
    ) -> None:
        super().__init__(scheduler, controller, target)
        self._awaited: list[int] = []
        """Iterations whose tokens were taken in since the last microbatch was made."""
        self.asks = scheduler.num_spec_tokens
        self._waiting = WAITING if getattr(scheduler, "ahead", 0) else 0.0
        self._chances = [1.0] * self._scheduler.num_spec_tokens
        """Probability of each draft, if those before it are right, lately."""
        self._drafted = 1.0 + self._scheduler.num_spec_tokens
        """Tokens of a request in a pass that verified drafts, lately."""

    def _fit(self) -> bool:
        awaited = self._awaited
        self._awaited = []
        for number, drafts in self._scheduler.head_drafts.take(awaited).items():
            self._hand_on(number, self._unforced(drafts))
            if not drafts:
                self._miss()
        super()._fit()
        # One more at a time: of drafts behind those that were wrong nothing has been seen for long.
        most = min(self._worth_making(), self.asks + 1)
        running = self._scheduler.running
        if most and self._pace.tries(len(running), self._tokens_a_pass):
            most = 0
        self.asks = most
        # Tokens that a grammar forces are drafts of each of its requests.
        grammars = any(request.use_structured_output for request in running)
        self._scheduler.waits_for_drafts = most > 0 or grammars
        if most < len(self._chances):  # it may have become worth more: new requests are others
            self._chances[most] = min(1.0, self._chances[most] + RATE * LOSS)
        for request in running:
            request.spec_token_ids = request.spec_token_ids[: max(most, 1)]
        return True

    def _miss(self) -> None:
        """Note that a pass of the head has failed, or came too late: as if the first draft were wrong."""
        self._chances[0] *= 1.0 - RATE

    def _unforced(self, drafts: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """``drafts`` of requests that have none yet: tokens that a grammar forces are right, and stand
        already."""
        requests = self._scheduler.requests
        return {
            name: tokens
            for name, tokens in drafts.items()
            if name in requests and not requests[name].spec_token_ids
        }

    def _worth_making(self) -> int:
        """Drafts of a request that are worth their rows, the head's passes, and that slots wait for them.

        A row has a usual price until its own is known. Rejected: to make all drafts until then. Passes of
        one request had as many rows each time, which told no price.
        """
        worth = self._scheduler.tracker.worth
        if worth >= 1.0:  # there is no room
            return 0
        worth += self._pass_price()
        slowdown = self._pace.slowdown(len(self._scheduler.running))
        if slowdown is None and self._chances[0] <= worth + self._waiting * self._tokens_a_pass:
            return 0
        if slowdown is not None and not pays(self._drafted, slowdown, drafting=self.asks > 0):
            return 0
        chance = 1.0
        for number, step in enumerate(self._chances):
            chance *= step
            if chance <= worth:
                return number
        return len(self._chances)

    def _pass_price(self) -> float:
        """Probability that a draft needs for the head's pass alone: all requests wait for it."""
        if self._controller is None:
            return 0.0
        formed = max(self._controller.formed, 1)
        period = self._controller.alone(len(self._scheduler.running))
        seconds: float = formed * self._scheduler.head_drafts.pass_seconds
        if period <= 0:  # it is not known yet
            return 0.0
        return self._tokens_a_pass * seconds / (period + seconds)

    def _take(self, iteration: Iteration) -> None:
        self._awaited.append(iteration.number)
        outcome = iteration.outcome
        in_the_pass = iteration.work.on_device and iteration.scheduled.asks
        if in_the_pass and outcome.drawn and not outcome.drafts:
            self._miss()
        super()._take(iteration)
        self._follow_chances(iteration)
        self._follow_pace(iteration, drafting=self.asks > 0)

    def _follow_chances(self, iteration: Iteration) -> None:
        """Follow the probability of each draft, by those that ``iteration`` verified."""
        drafts = iteration.output.scheduled_spec_decode_tokens
        if not drafts:
            return
        # A request gets a token for each draft that was right, and one more.
        drawn = iteration.outcome.drawn
        offered_and_right = [
            (len(tokens), drawn[name] - 1) for name, tokens in drafts.items() if name in drawn
        ]
        for number, chance in enumerate(self._chances):
            # A draft was tried where those before it were right.
            hits = [
                right > number
                for offered, right in offered_and_right
                if min(offered, right + 1) > number
            ]
            if hits:
                self._chances[number] += RATE * (sum(hits) / len(hits) - chance)
        if drawn:
            self._drafted += RATE * (sum(drawn.values()) / len(drawn) - self._drafted)


def pays(tokens: float, slowdown: float, *, drafting: bool) -> bool:
    """Say if ``tokens`` of a request in a pass, by drafts, make up for periods that are ``slowdown`` times
    as long; ``drafting``: whether drafts are made now."""
    return tokens > slowdown * (1.0 - BAND if drafting else 1.0 + BAND)


def _level(lengths: list[int], room: int) -> int:
    """The largest number of drafts that each request may have, so that all have ``room`` at most.

    Args:
        lengths: Drafts that there are, by request.
    """
    most = max(lengths, default=0)
    while most and sum(min(length, most) for length in lengths) > room:  # bound: `most`
        most -= 1
    return most
