"""The engine's view of every live request: enough to tell a sampler, and to rebuild one.

vLLM's scheduler decides which tokens a request has; the executor sees them as numbers of output
tokens in each scheduling output, and the tokens themselves as what the samplers returned. The
tracker turns the difference between two scheduling outputs into the samplers' :class:`Step`.

Invariant: a request is in at most one iteration in flight whose tokens count, so the state after the last
scheduling output is also the state at the request's own iteration. That is what makes a
restarted sampler's snapshot exact.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.tracked_request import ON_DEVICE, TrackedRequest
from sipipe.messages.params import SequenceParams, derive_seed, is_plain
from sipipe.messages.step import Added, Grammar, Step, int32_bytes

if TYPE_CHECKING:
    import torch


MOST_IDS = 1 << 14
"""Of clients that are remembered: a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one scheduling output asks of samplers and workers."""

    step: Step = field(default_factory=lambda: Step(-1))
    request_ids: list[str] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    """The request of each row of logits for samplers: as often as it has drafts, and once more."""
    on_device: list[str] = field(default_factory=list)
    """Requests that get a token of the last stage's device, in the order in which it says them."""
    samplers: tuple[int, ...] = ()
    """The samplers that own a row."""
    prompt_logprobs: tuple[str, ...] = ()
    """Requests whose prompt log-probabilities are complete after this iteration."""


class RequestTracker:
    """Follows scheduling outputs. Called by the engine thread, the thread that gathers tokens, and
    for the snapshot the one that replaces a sampler; each call is under ``_lock``."""

    def __init__(self, *, engine_seed: int, balancer: Balancer) -> None:
        self.draws = "on"
        """Who draws, as ``cpu_sampling`` says it: ``"per_row"`` has requests that ask for no more
        than a temperature drawn on the device, ``"off"`` all."""
        self.worth = 1.0
        """How likely drafts have to be; the scheduler says it before each output."""
        self._engine_seed = engine_seed
        self._balancer = balancer
        self._evening = BestEffort("evening the samplers' work", bounded=False)
        self._requests: dict[str, TrackedRequest] = {}
        self._next_handle = 0
        self._names: dict[str, str] = {}
        """What the seeds of requests come from that have arrived and are not scheduled yet."""
        self._arrivals = 0
        self._uses: dict[int, int] = {}
        """How often clients gave each id, of the last :data:`MOST_IDS`."""
        self._drafts: dict[str, list[int]] = {}
        """Of the last scheduling output."""
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it

    def arrived(self, request_id: str) -> None:
        """The scheduler was given a request; called in the order in which they came."""
        with self._lock:
            if request_id not in self._names and request_id not in self._requests:
                self._names[request_id] = self._name(request_id)

    def condemn(self, handle: int, reason: str) -> None:
        """No sampler is to look at this request any more: it fails with its next token."""
        with self._lock:
            for request in self._requests.values():
                if request.handle == handle:
                    request.error = reason

    def record(self, iteration: int, drawn: Iterable[tuple[str, list[int]]]) -> None:
        """Tokens were drawn, by request; the scheduler will say whether it took them. Of a request
        that was preempted and scheduled again meanwhile (vLLM does so when the prefix cache is
        reset) vLLM discards them, and so does the tracker."""
        with self._lock:
            for request_id, tokens in drawn:
                request = self._requests.get(request_id)
                if request is not None and request.iteration == iteration:
                    request.outputs += tokens

    def is_last(self, iteration: int, request_id: str) -> bool:
        """Whether the request is in no iteration after this one."""
        with self._lock:
            request = self._requests.get(request_id)
            return request is not None and request.iteration == iteration

    def advance(self, iteration: int, output: SchedulerOutput) -> Work:
        """Follow one scheduling output; fill in ``new_token_ids`` that vLLM omits or did not know."""
        with self._lock:
            return self._advance(iteration, output)

    def _advance(self, iteration: int, output: SchedulerOutput) -> Work:
        removed = self._remove(output.finished_req_ids)
        added, appended, tokens = [], [], []
        rows, owners, follows = list[int](), list[int](), list[int]()
        sampled, on_device, complete = list[str](), list[str](), list[str]()
        drafts = self._drafts = output.scheduled_spec_decode_tokens
        # Requests that have been here, and how many output tokens the scheduler holds of each.
        held: list[tuple[TrackedRequest, int]] = []
        beside: list[float] = []
        moved: TrackedRequest | None = None
        others = self._members(output.scheduled_cached_reqs)
        if output.scheduled_new_reqs:
            beside = self._balancer.loads(others)
        elif (index := self._evening(None, self._balancer.move, others)) is not None:
            moved = others[index]
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids or [0] * _rows(new.prompt_embeds)
            resumed = self._requests.get(new.req_id)
            if resumed is not None and len(prompt) != resumed.prompt_length:
                # The next prompt of a streaming session: what follows has its own parameters.
                removed += self._remove([new.req_id])
                self._names[new.req_id] = f"{self._name(new.req_id)} {len(prompt)}"
                resumed = None
            if resumed is None:
                request = self._add(new.req_id, prompt, new.sampling_params, beside)
                if request.sampler != ON_DEVICE:
                    added.append(request.added())
                elif self.draws == "per_row":
                    _give_seed(new, request)
            else:  # preempted: it begins anew, with its tokens so far
                assert new.prefill_token_ids is not None, "the second runner's scheduling output"
                held.append((resumed, len(new.prefill_token_ids) - len(resumed.prompt)))
                if not held[-1][1]:  # what it had may be dropped: the stage scores it anew
                    resumed.prompt_logprobs = resumed.scores
                if resumed.sampler == ON_DEVICE and self.draws == "per_row":
                    _give_seed(new, resumed)
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        cached.new_token_ids = []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, start, count in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request, starts[request_id] = self._requests[request_id], start
            held.append((request, count))
            behind = drafts.get(request_id, ())
            stop = start + scheduled[request_id] - len(behind)
            found = _tokens(request, start, stop)
            cached.new_token_ids.append([*found, *behind] if behind else found)
        for request, count in held:
            if len(request.outputs) > count:  # the scheduler dropped a token: draw it again
                del request.outputs[count:]
            if request.sampler == ON_DEVICE:
                continue
            if (sent := request.sent) > count or request is moved:
                removed.append(request.handle)
                added.append(request.added())
            elif sent < count:
                appended += [request.handle] * (count - sent)
                tokens += request.outputs[sent:count]
                request.sent = count
        for request_id, count in scheduled.items():
            request = self._requests[request_id]
            request.iteration = iteration
            behind = drafts.get(request_id, ())
            end, prompt = starts[request_id] + count - len(behind), request.prompt_length
            if request.prompt_logprobs and end >= prompt:
                request.prompt_logprobs = False
                complete.append(request_id)
            if end != prompt + len(request.outputs):
                continue
            if request.sampler == ON_DEVICE:
                on_device.append(request_id)
                continue
            for follower in (-1, *behind):
                sampled.append(request_id)
                rows.append(request.handle)
                owners.append(request.sampler)
                follows.append(follower)
        step = Step(
            iteration=iteration,
            removed=int32_bytes(removed),
            added=added,
            appended=int32_bytes(appended),
            tokens=int32_bytes(tokens),
            rows=int32_bytes(rows),
            owners=int32_bytes(owners),
            grammar=output.has_structured_output_requests and (bool(rows) or self.draws == "off"),
            follows=int32_bytes(follows) if drafts else b"",
            worth=self.worth,
        )
        return Work(
            step=step,
            request_ids=list(output.num_scheduled_tokens),
            sampled=sampled,
            on_device=on_device,
            samplers=tuple(sorted(set(owners))),
            prompt_logprobs=tuple(complete),
        )

    def grammar(self, iteration: int, output: GrammarOutput | None) -> Grammar:
        """The samplers' form of a structured-output bitmask; empty when there is none."""
        if output is None:
            return Grammar(iteration, b"", 0, b"")
        names, bitmask = output.structured_output_request_ids, output.grammar_bitmask
        counts = [1 + len(self._drafts.get(name, ())) for name in names]
        if len(bitmask) > sum(counts):  # vLLM 0.33: blocks, each for as many drafts as may come
            blocks = bitmask.reshape(len(names), -1, bitmask.shape[1])
            bitmask = np.concatenate([block[:n] for block, n in zip(blocks, counts, strict=True)])
        handles = np.repeat([self._requests[name].handle for name in names], counts)
        return Grammar(iteration, int32_bytes(handles), bitmask.shape[1], int32_bytes(bitmask))

    def added_of(self, sampler: int) -> list[Added]:
        """The sequences of one sampler, for its snapshot after a restart."""
        with self._lock:
            return [r.added() for r in self._requests.values() if r.sampler == sampler]

    def _remove(self, request_ids: Iterable[str]) -> list[int]:
        handles = []
        for request_id in request_ids:
            self._names.pop(request_id, None)
            request = self._requests.pop(request_id, None)
            if request is not None and request.sampler != ON_DEVICE:
                handles.append(request.handle)
        return handles

    def _members(self, cached: CachedRequestData) -> list[TrackedRequest]:
        """Whose tokens samplers draw, of a microbatch's requests that were in others before."""
        if self._balancer.samplers == 1:
            return []
        requests = (self._requests[name] for name in cached.req_ids)
        return [request for request in requests if request.sampler != ON_DEVICE]

    def _add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None,
        beside: list[float],
    ) -> TrackedRequest:
        error, name = "", self._names.pop(request_id, None) or self._name(request_id)
        params, cost, scores = SequenceParams(temperature=0.0), 0.0, False
        here = self.draws == "off" or (self.draws == "per_row" and is_plain(sampling_params))
        if self.draws != "off":  # else vLLM's sampler knows its own parameters
            assert sampling_params is not None, "pooling requests do not reach the samplers"
            try:
                params = sequence_params(sampling_params, derive_seed(self._engine_seed, name))
            except ValueError as problem:
                error = str(problem)
            cost = self._evening(0.0, self._balancer.cost, params)
            asked = sampling_params.prompt_logprobs, sampling_params.prompt_logprob_token_ids
            scores = any(one is not None for one in asked)  # an array is no truth
        request = TrackedRequest(
            handle=self._next_handle,
            sampler=ON_DEVICE if here else self._balancer.place(cost, beside),
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

    def _name(self, request_id: str) -> str:
        if (name := client_id(request_id)) is None:
            name, self._arrivals = f"arrival {self._arrivals}", self._arrivals + 1
            return name
        # Proxies hand one id on with several requests, whose draws shall not be the same.
        key = derive_seed(0, name)
        uses = self._uses[key] = self._uses.pop(key, 0) + 1
        if len(self._uses) > MOST_IDS:
            del self._uses[next(iter(self._uses))]
        return name if uses == 1 else f"{name} use {uses}"


_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def client_id(request_id: str) -> str | None:
    """The id that the client gave, of the one that vLLM made of it; None where it gave none. vLLM
    adds eight random characters to an id, and has one with 16 random hexadecimal digits for a
    client that gives none. Offline the id is the number of the request."""
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        request_id = _SUFFIX.sub("", request_id)
    return None if _RANDOM.search(request_id) else request_id


def _rows(embeddings: torch.Tensor | None) -> int:
    """Positions of a prompt that is given as embeddings, where vLLM has a token 0 for each."""
    return 0 if embeddings is None else len(embeddings)


def _give_seed(new: NewRequestData, request: TrackedRequest) -> None:
    """Tell the stage that draws for it the request's seed; the scheduler's parameters stay."""
    assert new.sampling_params is not None
    new.sampling_params = copy.copy(new.sampling_params)
    new.sampling_params.seed = request.params.seed


def sequence_params(params: SamplingParams, seed: int) -> SequenceParams:
    """What of vLLM's ``SamplingParams`` concerns drawing a token. ``seed`` is used where the request
    brings none. Raises ValueError: a parameter that the samplers do not take."""
    found = SequenceParams.of(params)
    return found if found.seed is not None else msgspec.structs.replace(found, seed=seed)


def _tokens(request: TrackedRequest, start: int, stop: int) -> list[int]:
    """Tokens at positions ``start`` to ``stop`` of prompt and outputs."""
    prompt = request.prompt_length
    if start >= prompt:
        return request.outputs[start - prompt : stop - prompt]
    found = list(request.prompt[start:stop])
    if stop > prompt:
        found += request.outputs[: stop - prompt]
    return found
