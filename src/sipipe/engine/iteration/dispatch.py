"""Iterations out: each scheduling output to workers and samplers, in one message of BIC-I.

Who runs here
    The engine thread gives iterations and their bitmasks. What waits for tokens is published by the
    thread that brings them (:mod:`sipipe.engine.iteration.resolve`), or a little later by the engine thread.

Invariant: ``bus.order`` is held from the moment the tracker follows a scheduling output until that
output is on BIC-I, so that a snapshot never holds a change which is still to come.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from sipipe.engine.iteration.bus import Bus
from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.engine.iteration.iteration import Iteration
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.iteration.telemetry import Telemetry
from sipipe.ipc.gather import GatherReceiver
from sipipe.messages.header import Kind
from sipipe.messages.pickles import out_of_band
from sipipe.messages.step import encode, int32_bytes
from sipipe.observe.live import Word
from sipipe.observe.phases import Phase

_CARRIED: dict[str, Callable[[list[Any]], Any]] = {
    "finished_req_ids": lambda sets: set().union(*sets),
    "preempted_req_ids": lambda sets: set().union(*sets),
    "free_encoder_mm_hashes": lambda lists: list(chain(*lists)),
    "new_block_ids_to_zero": lambda lists: list(chain(*lists)) or None,
    "kv_cache_block_copies": lambda lists: list(chain(*lists)) or None,
}
"""Fields of a scheduling output that change workers' state, and the join of several outputs' values."""


class Dispatcher:
    """Publishes what the scheduler decided."""

    def __init__(
        self,
        *,
        bus: Bus,
        iterations: Iterations,
        tracker: RequestTracker,
        gather: GatherReceiver,
        telemetry: Telemetry,
        empty: bool,
        head_drafts: HeadDrafts | None = None,
    ) -> None:
        """Make the dispatcher of one pipeline.

        With ``empty``, scheduling outputs without tokens are iterations too, as KV connectors need.
        ``head_drafts`` has the requests for drafts, where a head on the last stage makes them."""
        self._bus = bus
        self._iterations = iterations
        self._tracker = tracker
        self._gather = gather
        self._telemetry = telemetry
        self.empty = empty
        self.head_drafts = head_drafts
        self._last: Iteration | None = None
        """The iteration that was given last, whose bitmask comes next."""
        self._untold: SchedulerOutput | None = None
        """A scheduling output with all that those without tokens have said since the last that was published.
        While an engine is paused, each request that leaves is such an output."""

    def publish(self, output: SchedulerOutput) -> bool:
        """Have one iteration published, now or when its time has come (:meth:`.Iterations.begin`);
        False if it has no tokens: what such an output tells workers goes with the next one."""
        if output.total_num_scheduled_tokens == 0 and not self.empty:
            if _says_something(output):  # the visit of a closed slot says nothing
                self._carry_on(output)
                self._untold = output
            self._last = None
            return False
        self._carry_on(output)
        self._last = self._iterations.enter(output)
        self.publish_due()
        return True

    def _carry_on(self, output: SchedulerOutput) -> None:
        """Put what is still to be told into ``output``."""
        if self._untold is not None:
            _carry(self._untold, output)
            self._untold = None

    def publish_due(self, wait: bool = True) -> None:
        """Publish iterations whose time has come. The engine thread does when it has entered one, and
        when it takes a result in. Before, who brings tokens does, without ``wait``: it has more to
        bring, and leaves to the engine thread what could wait for readers, or for ``bus.order``."""
        follow = self._tracker.advance
        # wait: with `wait` as the bus has it; who publishes
        while self._bus.order.acquire(blocking=wait):
            try:
                while (iteration := self._iterations.begin(follow, short=not wait)) is not None:
                    self._send(iteration)
                planned = self._iterations.plan() if wait else None
                if planned is None:
                    return
                number, iteration = planned
                self._tell_drafts_asked(iteration)
                parts = [b"", *out_of_band(iteration.output)]
                self._bus.publish(Kind.PLAN, number, parts, slot=iteration.slot)
            finally:
                self._bus.order.release()
            # Once more: whoever brought its tokens meanwhile has found the order taken, and left.

    def publish_all(self) -> None:
        """Publish all that has been scheduled. Engine thread."""
        while self._iterations.wait_for_first():
            self.publish_due()

    def _send(self, iteration: Iteration) -> None:
        work = iteration.work
        if work.samplers:
            self._gather.expect(iteration.number, work.samplers)
        began = time.monotonic_ns()
        # The wait for its tokens may begin before this thread runs again behind the publishing.
        iteration.on_bus.published_ns = began
        if iteration.on_bus.planned:
            tokens = iteration.output.scheduled_cached_reqs.new_token_ids
            parts = [int32_bytes(list(chain.from_iterable(tokens)))]
        else:
            self._tell_drafts_asked(iteration)
            parts = out_of_band(iteration.output)
        self._bus.publish(
            Kind.SCHEDULE,
            iteration.number,
            [encode(work.step), *parts],
            slot=iteration.slot,
            logits=(iteration.begun.logits_row, len(work.sampled)),
        )
        published = time.monotonic_ns()
        iteration.on_bus.published_ns = published
        scheduled = iteration.scheduled
        if scheduled.ended_ns:
            self._telemetry.record(
                Phase.SCHEDULE, iteration, scheduled.began_ns, scheduled.ended_ns
            )
        self._telemetry.record(Phase.DISPATCH, iteration, began, published)
        self._telemetry.live.set(Word.INFLIGHT, len(self._iterations))
        if iteration.on_bus.bitmask_given:
            self._send_grammar(iteration)

    def _tell_drafts_asked(self, iteration: Iteration) -> None:
        """Have the output of ``iteration`` say how many requests for drafts the last stage is to run
        before it. No later one is for blocks that it gave away: the tracker has followed this output, or
        none comes before it begins, as it is planned."""
        if self.head_drafts is not None:
            iteration.output.drafts_asked = self.head_drafts.sent()

    def publish_grammar(self, output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """The future of the iteration given last; tells who draws its bitmask first."""
        iteration = self._last
        assert iteration is not None, "sample_tokens without execute_model"
        with self._bus.order:
            on_bus = iteration.on_bus
            on_bus.bitmask_given = True
            on_bus.bitmask = output
            if iteration.number >= 0:
                self._send_grammar(iteration)
            elif output is not None:
                # It is sent behind the iteration, and vLLM uses the array again before that.
                on_bus.bitmask = replace(output, grammar_bitmask=output.grammar_bitmask.copy())
        self._telemetry.poll()
        return iteration.future

    def _send_grammar(self, iteration: Iteration) -> None:
        work = iteration.work
        if not work.step.grammar:
            return
        if work.samplers:
            grammar = self._tracker.grammar(iteration.number, iteration.on_bus.bitmask)
            iteration.on_bus.grammar = grammar
            parts = [encode(grammar)]
        else:  # vLLM's sampler draws, on the last stage
            parts = [b"", *out_of_band(iteration.on_bus.bitmask)]
        self._bus.publish(Kind.GRAMMAR, iteration.number, parts, slot=iteration.slot)


def _says_something(output: SchedulerOutput) -> bool:
    aux = output.aux_output_connector_metadata
    news = {} if aux is None else {**vars(aux), "generation": None, "requests": None}
    return any(getattr(output, name, None) for name in _CARRIED) or any(news.values())


def _carry(earlier: SchedulerOutput, output: SchedulerOutput) -> None:
    """Put what an ``earlier`` output without tokens says of workers' state into ``output``."""
    for name, join in _CARRIED.items():
        values = [getattr(one, name, None) for one in (earlier, output)]
        if (said := [value for value in values if value]) or hasattr(output, name):
            setattr(output, name, join(said))
    # Of routed experts vLLM tells each change once, and each is a step of its own.
    metadata = [*getattr(earlier, "earlier_aux_metadata", ())]
    if earlier.aux_output_connector_metadata is not None:
        metadata.append(earlier.aux_output_connector_metadata)
    if metadata:
        output.earlier_aux_metadata = metadata
