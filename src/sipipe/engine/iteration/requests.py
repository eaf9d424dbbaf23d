"""The engine's view of every live request: enough to tell a sampler, and to rebuild one.

vLLM's scheduler decides which tokens a request has; the executor sees them as numbers of output
tokens in each scheduling output, and the tokens themselves as what the samplers returned. The
tracker turns the difference between two scheduling outputs into the samplers' :class:`Step`.

One scheduling output is followed in this order (:meth:`RequestTracker.advance`):

1. requests that ended leave;
2. one request may change its sampler, to keep the samplers' work even;
3. *new* requests join; among them vLLM lists those that were preempted and begin anew;
4. *cached* requests, which were in scheduling outputs before, get their next tokens' numbers;
5. samplers are sent what the scheduler holds of both and they do not have;
6. the *rows* of logits are listed that will be drawn.

Invariant: a request is in at most one iteration in flight whose tokens count, so the state after the
last scheduling output is also the state at the request's own iteration. That is what makes a
restarted sampler's snapshot exact.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.request_names import RequestNames
from sipipe.engine.iteration.tracked_request import ON_DEVICE, TrackedRequest
from sipipe.engine.iteration.work import RowsToDraw, StateChanges, Work
from sipipe.messages.params import SequenceParams, derive_seed, is_plain
from sipipe.messages.step import Added, Grammar, Step, int32_bytes


class RequestTracker:
    """Follows scheduling outputs.

    The engine thread calls it, the thread that gathers tokens, and for the snapshot the one that
    replaces a sampler. ``_lock`` guards everything but ``draws``, ``worth`` and ``_drafts``: the
    first is set once before the engine serves; the second is the scheduler's, which says it before it
    schedules; the third belongs to who holds ``bus.order``, as every caller of ``advance`` and
    ``grammar`` does.
    """

    def __init__(self, *, engine_seed: int, balancer: Balancer) -> None:
        self.draws = "on"
        """Drawer of tokens, as ``cpu_sampling`` says it: ``"per_row"`` has requests that ask for no more
        than a temperature drawn on the device, ``"off"`` all."""
        self.worth = 1.0
        """Probability that a draft needs to be proposed."""
        self._engine_seed = engine_seed
        self._balancer = balancer
        self._evening = BestEffort("evening the samplers' work", bounded=False)
        self._requests: dict[str, TrackedRequest] = {}
        self._next_handle = 0
        self._names = RequestNames()
        self._drafts: dict[str, list[int]] = {}
        """Draft tokens by request, in the last scheduling output."""
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it

    def arrived(self, request_id: str) -> None:
        """The scheduler was given a request; called in the order in which they came."""
        with self._lock:
            if request_id not in self._requests:
                self._names.arrive(request_id)

    def condemn(self, handle: int, reason: str) -> None:
        """No sampler is to look at this request any more: it fails with its next token."""
        with self._lock:
            for request in self._requests.values():
                if request.handle == handle:
                    request.error = reason

    def record(self, iteration: int, drawn: Iterable[tuple[str, list[int]]]) -> None:
        """Take in the tokens that were drawn in ``iteration``, by request.

        The scheduler will say whether it took them. Tokens of a request that was preempted and
        scheduled again meanwhile are dropped, as vLLM drops them; it does so when its prefix cache is
        reset.
        """
        with self._lock:
            for request_id, tokens in drawn:
                request = self._requests.get(request_id)
                if request is not None and request.iteration == iteration:
                    request.outputs += tokens

    def with_blocks(self, iteration: int, request_ids: Iterable[str]) -> set[str]:
        """Those of ``request_ids`` that are in no iteration after this one, and have their blocks."""
        with self._lock:
            return {
                request_id
                for request_id in request_ids
                if (request := self._requests.get(request_id)) is not None
                and request.iteration == iteration
                and request.has_blocks
            }

    def is_last(self, iteration: int, request_id: str) -> bool:
        """Say if the request is in no iteration after this one."""
        with self._lock:
            request = self._requests.get(request_id)
            return request is not None and request.iteration == iteration

    def advance(self, iteration: int, output: SchedulerOutput) -> Work:
        """Follow one scheduling output, whose iteration has the number ``iteration``.

        Fills in ``new_token_ids`` of its cached requests, which vLLM omits or did not know, and gives
        new requests their seed where the device draws for them.
        """
        with self._lock:
            self._drafts = output.scheduled_spec_decode_tokens
            changes = StateChanges(removed=self._remove(output.finished_req_ids))
            for request_id in output.preempted_req_ids or ():
                if request_id in self._requests:
                    self._requests[request_id].has_blocks = False
            loads, moved = self._even_out(output)
            resumed = self._follow_new(output.scheduled_new_reqs, loads, changes)
            continued = self._follow_cached(output)
            _bring_up_to_date((*resumed, *continued), moved, changes)
            rows = self._rows(iteration, output)
        return self._work(iteration, output, changes, rows)

    def grammar(self, iteration: int, output: GrammarOutput | None) -> Grammar:
        """The samplers' form of the structured-output bitmask of the output followed last.

        A request has one row of the mask for each row of its logits. Empty where ``output`` is None.
        """
        if output is None:
            return Grammar(iteration=iteration, handles=b"", words=0, bitmask=b"")
        request_ids = output.structured_output_request_ids
        bitmask = output.grammar_bitmask
        counts = [1 + len(self._drafts.get(request_id, ())) for request_id in request_ids]
        if len(bitmask) > sum(counts):  # vLLM 0.33: blocks, each for as many drafts as may come
            blocks = bitmask.reshape(len(request_ids), -1, bitmask.shape[1])
            bitmask = np.concatenate(
                [block[:count] for block, count in zip(blocks, counts, strict=True)]
            )
        handles = [self._requests[request_id].handle for request_id in request_ids]
        return Grammar(
            iteration=iteration,
            handles=int32_bytes(np.repeat(handles, counts)),
            words=bitmask.shape[1],
            bitmask=int32_bytes(bitmask),
        )

    def added_of(self, sampler: int) -> list[Added]:
        """The sequences of one sampler, for its snapshot after a restart."""
        with self._lock:
            return [
                request.added() for request in self._requests.values() if request.sampler == sampler
            ]

    def _remove(self, request_ids: Iterable[str]) -> list[int]:
        """Forget requests; returns the handles of those that a sampler keeps."""
        handles = []
        for request_id in request_ids:
            self._names.forget(request_id)
            request = self._requests.pop(request_id, None)
            if request is not None and request.sampler != ON_DEVICE:
                handles.append(request.handle)
        return handles

    def _even_out(self, output: SchedulerOutput) -> tuple[list[float], TrackedRequest | None]:
        """Keep the samplers' work of this microbatch even.

        Returns each sampler's load, to which new requests are added; else, where none is new, the
        request that was given another sampler.
        """
        members = self._members(output.scheduled_cached_reqs)
        if output.scheduled_new_reqs:
            return self._balancer.loads(members), None
        index = self._evening(None, self._balancer.move, members)
        return [], None if index is None else members[index]

    def _members(self, cached: CachedRequestData) -> list[TrackedRequest]:
        """Cached requests of a microbatch whose tokens samplers draw; none with a single sampler,
        which has nothing to share out."""
        if self._balancer.samplers == 1:
            return []
        requests = (self._requests[request_id] for request_id in cached.req_ids)
        return [request for request in requests if request.sampler != ON_DEVICE]

    def _follow_new(
        self, new_requests: list[NewRequestData], loads: list[float], changes: StateChanges
    ) -> list[TrackedRequest]:
        """Take in the requests that the scheduler lists as new; returns those that are not: they were
        preempted, and begin anew with their tokens so far."""
        resumed = []
        for new in new_requests:
            prompt = new.prompt_token_ids or [0] * _embedded_positions(new)
            request = self._requests.get(new.req_id)
            if request is not None and len(prompt) != request.prompt_length:
                # The next prompt of a streaming session: what follows has its own parameters.
                changes.removed += self._remove([new.req_id])
                self._names.arrive_again(new.req_id, len(prompt))
                request = None
            if request is None:
                request = self._add(new.req_id, prompt, new.sampling_params, loads)
                if request.sampler != ON_DEVICE:
                    changes.added.append(request.added())
            else:
                assert new.prefill_token_ids is not None, "the second runner's scheduling output"
                request.held = len(new.prefill_token_ids) - len(request.prompt)
                if request.held == 0:  # its scores may have been dropped: the stage makes them anew
                    request.prompt_logprobs = request.scores
                resumed.append(request)
            request.start = new.num_computed_tokens
            request.has_blocks = True
            if request.sampler == ON_DEVICE and self.draws == "per_row":
                _give_seed(new, request)
        return resumed

    def _follow_cached(self, output: SchedulerOutput) -> list[TrackedRequest]:
        """Note what the scheduler holds of requests that were in outputs before, and fill in their
        tokens of this iteration."""
        cached = output.scheduled_cached_reqs
        drafts_of = output.scheduled_spec_decode_tokens
        cached.new_token_ids = []
        requests = []
        for request_id, start, held in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request = self._requests[request_id]
            request.start = start
            request.held = held
            requests.append(request)
            count = output.num_scheduled_tokens[request_id]
            drafts = drafts_of.get(request_id)
            if drafts:
                tokens = request.tokens(start, start + count - len(drafts))
                cached.new_token_ids.append([*tokens, *drafts])
            else:
                cached.new_token_ids.append(request.tokens(start, start + count))
        return requests

    def _rows(self, iteration: int, output: SchedulerOutput) -> RowsToDraw:
        """List the rows that are drawn, in the order of the scheduling output."""
        rows = RowsToDraw()
        drafts_of = output.scheduled_spec_decode_tokens
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            request.iteration = iteration
            drafts = drafts_of.get(request_id, ())
            end = request.start + count - len(drafts)
            if request.prompt_logprobs and end >= request.prompt_length:
                request.prompt_logprobs = False
                rows.prompt_logprobs.append(request_id)
            if end != request.prompt_length + len(request.outputs):
                continue  # more of its prompt comes first
            if request.sampler == ON_DEVICE:
                rows.on_device.append(request_id)
            else:
                rows.add(request_id, request, drafts)
        return rows

    def _work(
        self, iteration: int, output: SchedulerOutput, changes: StateChanges, rows: RowsToDraw
    ) -> Work:
        owners = [request.sampler for request in rows.requests]
        # Where samplers draw nothing of an iteration, a mask concerns none of its rows.
        masked = bool(rows.requests) or self.draws == "off"
        step = Step(
            iteration=iteration,
            removed=int32_bytes(changes.removed),
            added=changes.added,
            appended=int32_bytes(changes.appended),
            tokens=int32_bytes(changes.tokens),
            rows=int32_bytes([request.handle for request in rows.requests]),
            owners=int32_bytes(owners),
            grammar=output.has_structured_output_requests and masked,
            follows=int32_bytes(rows.follows) if output.scheduled_spec_decode_tokens else b"",
            worth=self.worth,
        )
        return Work(
            step=step,
            request_ids=list(output.num_scheduled_tokens),
            sampled=rows.request_ids,
            on_device=rows.on_device,
            samplers=tuple(sorted(set(owners))),
            prompt_logprobs=tuple(rows.prompt_logprobs),
        )

    def _add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None,
        loads: list[float],
    ) -> TrackedRequest:
        """Keep a new request, and choose who draws for it."""
        name = self._names.take(request_id)
        params = SequenceParams(temperature=0.0)
        cost = 0.0
        scores = False
        error = ""
        if self.draws != "off":  # else vLLM's sampler knows its own parameters
            # vLLM refuses a pooling request to a model that generates, in each of its front ends.
            assert sampling_params is not None, "pooling requests do not reach the samplers"
            try:
                params = sequence_params(sampling_params, derive_seed(self._engine_seed, name))
            except ValueError as problem:
                error = str(problem)
            cost = self._evening(0.0, self._balancer.cost, params)
            scores = _asks_for_prompt_scores(sampling_params)
        on_device = self.draws == "off" or (self.draws == "per_row" and is_plain(sampling_params))
        request = TrackedRequest(
            handle=self._next_handle,
            sampler=ON_DEVICE if on_device else self._balancer.place(cost, loads),
            params=params,
            cost=cost,
            prompt=prompt,
            prompt_length=len(prompt),
            error=error,
            scores=scores,
            prompt_logprobs=scores,
        )
        self._next_handle = (self._next_handle + 1) % 2**31  # as an int32; no request is so old
        self._requests[request_id] = request
        return request


def _bring_up_to_date(
    requests: Iterable[TrackedRequest], moved: TrackedRequest | None, changes: StateChanges
) -> None:
    """Give samplers what the scheduler holds of their requests. ``moved`` has a new sampler."""
    for request in requests:
        held = request.held
        if len(request.outputs) > held:  # the scheduler dropped a token: draw it again
            del request.outputs[held:]
        if request.sampler == ON_DEVICE:
            continue
        if request.sent > held or request is moved:  # a sampler cannot take tokens back
            changes.replace(request)
        elif request.sent < held:
            changes.append(request)


def _embedded_positions(new: NewRequestData) -> int:
    """Positions of a prompt that is given as embeddings; vLLM has a token 0 at each."""
    return 0 if new.prompt_embeds is None else len(new.prompt_embeds)


def _give_seed(new: NewRequestData, request: TrackedRequest) -> None:
    """Tell the stage that draws for it the request's seed; the scheduler's parameters stay."""
    assert new.sampling_params is not None
    new.sampling_params = copy.copy(new.sampling_params)
    new.sampling_params.seed = request.params.seed


def _asks_for_prompt_scores(params: SamplingParams) -> bool:
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None


def sequence_params(params: SamplingParams, seed: int) -> SequenceParams:
    """Take from vLLM's ``SamplingParams`` what concerns drawing a token. ``seed`` is used where the request
    brings none. Raises ValueError: a parameter that the samplers do not take."""
    sequence = SequenceParams.of(params)
    if sequence.seed is not None:
        return sequence
    return msgspec.structs.replace(sequence, seed=seed)
