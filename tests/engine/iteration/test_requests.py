"""The tracker's briefs against the obvious: whatever is scheduled, samplers know what was accepted."""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduled import new_request
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils import random_uuid
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.engine.input_processor import InputProcessor

from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.messages.params import is_plain
from sipipe.messages.step import int32_bytes, int32_view


class Sequences:
    """A scheduler that schedules at random, and what it holds of each request."""

    def __init__(self, rng, *, stages):
        self.rng, self.stages = rng, stages
        self.prompt, self.outputs, self.computed = {}, {}, {}
        self.started, self.preempted, self.finished = set(), set(), set()
        self.logprobs = set()  # requests whose prompt is still to be scored
        self.asking = set()  # requests that ask for log-probabilities of their prompt
        self.plain = set()  # requests that ask for no more than a temperature
        self.busy = {}  # request -> iteration that it is in
        self.count = 0

    def schedule(self, iteration):
        rng = self.rng
        new, cached = [], CachedRequestData.make_empty()
        scheduled = {}
        if rng.random() < 0.6:
            self.count += 1
            name = f"r{self.count}"
            self.prompt[name] = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
            self.outputs[name], self.computed[name] = [], 0
            if rng.random() < 0.5:
                self.plain.add(name)
        for name in list(self.prompt):
            if name in self.busy or rng.random() < 0.3:
                continue
            resumed = name in self.started and rng.random() < 0.1
            if resumed:
                self.computed[name] = 0
                self.preempted.add(name)
            tokens = self.prompt[name] + self.outputs[name]
            count = rng.randint(1, len(tokens) - self.computed[name])
            scheduled[name] = count
            if name not in self.started or resumed:
                scored = rng.choice(
                    [{}, {"prompt_logprobs": 1}, {"prompt_logprob_token_ids": [[1]]}]
                )
                if scored and name not in self.started:
                    self.asking.add(name)
                if name in self.asking and not self.outputs[name]:  # also anew
                    self.logprobs.add(name)
                self.started.add(name)
                new.append(
                    new_request(
                        name,
                        self.prompt[name],
                        params=SamplingParams(**scored, top_k=0 if name in self.plain else 5),
                        computed=self.computed[name],
                        prefill=tokens,
                    )
                )
            else:
                start = self.computed[name]
                cached.req_ids.append(name)
                cached.num_computed_tokens.append(start)
                cached.num_output_tokens.append(len(self.outputs[name]))
                cached.new_block_ids.append(None)
                if self.stages > 1:
                    cached.new_token_ids.append(tokens[start : start + count])
            self.busy[name] = iteration
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.num_scheduled_tokens = {
            **{r.req_id: scheduled[r.req_id] for r in new},
            **{name: scheduled[name] for name in cached.req_ids},
        }
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.finished_req_ids, self.finished = self.finished, set()
        return output

    def update(self, output, drawn):
        for name, count in output.num_scheduled_tokens.items():
            del self.busy[name]
            self.computed[name] += count
            if name in drawn and self.rng.random() < 0.9:  # else: vLLM drops a stale token
                self.outputs[name].append(drawn[name])
            elif name in drawn:
                self.computed[name] = 0
            if self.rng.random() < 0.1:
                for table in (self.prompt, self.outputs, self.computed):
                    del table[name]
                self.started.discard(name)
                self.finished.add(name)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_samplers_hold_what_the_scheduler_holds(seed, stages, samplers, per_row):
    """And nothing of requests that are drawn on the device."""
    rng = random.Random(seed)
    scheduler = Sequences(rng, stages=stages)
    balancer = Balancer(samplers, vocab_size=1000)
    tracker = RequestTracker(engine_seed=0, balancer=balancer)
    tracker.draws = "per_row" if per_row else "on"
    held = defaultdict(dict)  # sampler -> handle -> tokens
    names = {}  # handle -> request, once samplers have drawn for it
    flying = []
    for iteration in range(40):
        output = scheduler.schedule(iteration)
        asked = {
            name: name in scheduler.outputs
            and sum_of(scheduler, output, name)
            == len(scheduler.prompt[name]) + len(scheduler.outputs[name])
            for name in output.num_scheduled_tokens
        }
        work = tracker.advance(iteration, output)
        apply(held, work.step)
        here = scheduler.plain if per_row else set()
        assert work.sampled == [n for n, wants in asked.items() if wants and n not in here]
        assert work.on_device == [n for n, wants in asked.items() if wants and n in here]
        known = {
            names[handle] for sequences in held.values() for handle in sequences.keys() & names
        }
        assert known <= scheduler.started - here
        scored = [
            name
            for name in output.num_scheduled_tokens
            if name in scheduler.logprobs
            and sum_of(scheduler, output, name) >= len(scheduler.prompt[name])
        ]
        assert work.prompt_logprobs == tuple(scored)
        scheduler.logprobs.difference_update(scored)
        rows, owners = int32_view(work.step.rows).tolist(), int32_view(work.step.owners).tolist()
        for name, handle, owner in zip(work.sampled, rows, owners, strict=True):
            assert held[owner][handle] == (scheduler.prompt[name], scheduler.outputs[name])
            assert names.setdefault(handle, name) == name
        cached = output.scheduled_cached_reqs
        for name, start, tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=True
        ):
            whole = scheduler.prompt[name] + scheduler.outputs[name]
            assert tokens == whole[start : start + output.num_scheduled_tokens[name]]
        drawn = {n: rng.randrange(100) for n in work.sampled + work.on_device}
        flying.append((iteration, output, drawn))
        while len(flying) > stages or (flying and rng.random() < 0.3):
            number, done, drawn = flying.pop(0)
            for name, token in drawn.items():
                tracker.record(number, [(name, [token])])
            scheduler.update(done, drawn)
        for sampler in range(samplers):  # a snapshot at any moment tells the same
            handles = (
                {join.handle for join in tracker.added_of(sampler)} if rng.random() < 0.1 else ()
            )
            for handle in handles:
                held[sampler].pop(handle, None)
            if handles:
                apply_added(held, tracker.added_of(sampler))


def sum_of(scheduler, output, name):
    return scheduler.computed[name] + output.num_scheduled_tokens[name]


def apply_added(held, joins):
    for join in joins:
        assert join.handle not in held[join.sampler]
        held[join.sampler][join.handle] = (
            int32_view(join.prompt).tolist(),
            int32_view(join.outputs).tolist(),
        )


def apply(held, step):
    for handle in int32_view(step.removed).tolist():
        for sequences in held.values():
            sequences.pop(handle, None)
    apply_added(held, step.added)
    appended, tokens = int32_view(step.appended).tolist(), int32_view(step.tokens).tolist()
    for handle, token in zip(appended, tokens, strict=True):
        owners = [sequences for sequences in held.values() if handle in sequences]
        assert len(owners) == 1
        owners[0][handle][1].append(token)


def scheduled(*requests):
    """All tokens that these new requests have."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [*requests]
    for one in requests:
        count = len(one.prefill_token_ids or one.prompt_token_ids)
        output.num_scheduled_tokens[one.req_id] = count
        output.total_num_scheduled_tokens += count
    return output


def test_parameters_that_no_sampler_takes_fail_their_request_alone():
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    wrong = SamplingParams()
    wrong.temperature = 7.0  # as if a later vLLM allowed it
    assert not is_plain(wrong), "it is a sampler's"
    both = new_request("good", [1, 2]), new_request("bad", [1, 2], params=wrong)
    work = tracker.advance(0, scheduled(*both))
    good, bad = work.step.added
    assert not good.error
    assert "temperature" in bad.error
    assert work.sampled == ["good", "bad"]
    tracker.condemn(good.handle, "it ended its samplers")
    assert [one.error for one in tracker.added_of(0)] == ["it ended its samplers", bad.error]


def test_the_next_prompt_of_a_streaming_session_has_its_own_parameters():
    """vLLM adds it to the prompt, in place, and schedules the request as a new one."""
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    prompt, added = [1, 2], []
    for iteration, params in enumerate([SamplingParams(), SamplingParams(logprobs=3)]):
        new = new_request("a", prompt, prefill=prompt, params=params)
        work = tracker.advance(iteration, scheduled(new))
        added += work.step.added
        assert work.sampled == ["a"]
        tracker.record(iteration, [("a", [7])])
        prompt += [5, 6]
    first, second = added
    assert int32_view(work.step.removed).tolist() == [first.handle]
    assert [one.params.logprobs for one in added] == [None, 3]
    assert first.params.seed != second.params.seed
    assert (first.prompt, second.prompt) == (int32_bytes([1, 2]), int32_bytes([1, 2, 5, 6]))
    assert not second.outputs
    [joined] = tracker.added_of(0)
    assert int32_view(joined.outputs).tolist() == [7]


def test_a_token_of_an_iteration_before_the_request_was_scheduled_again_is_dropped():
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    for iteration in (0, 1):
        tracker.advance(iteration, scheduled(new_request("a", [1, 2], prefill=[1, 2])))
    tracker.record(0, [("a", [7])])
    tracker.record(1, [("a", [8]), ("gone", [9])])
    [joined] = tracker.added_of(0)
    assert int32_view(joined.outputs).tolist() == [8]


@pytest.mark.parametrize("room", [0, 3], ids=["0.32", "0.33"])
def test_every_requests_masks_are_its_own(room):
    """vLLM 0.32 has one behind another, 0.33 a block for each, as long as any may be."""
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    output = scheduled(*(new_request(name, [1, 2], prefill=[1, 2]) for name in "abc"))
    output.scheduled_spec_decode_tokens = {"b": [7, 8]}
    added = {one.handle for one in tracker.advance(0, output).step.added}
    masks = {"c": [[1]], "b": [[2], [3], [4]], "a": [[5]]}
    filled = [block + [[-1]] * (room and room - len(block)) for block in masks.values()]
    bitmask = np.concatenate(filled).astype(np.int32)
    grammar = tracker.grammar(0, GrammarOutput(list(masks), bitmask))
    assert int32_view(grammar.bitmask).tolist() == [1, 2, 3, 4, 5]
    handles = int32_view(grammar.handles).tolist()
    assert set(handles) == added
    assert handles == [handles[0], *[handles[1]] * 3, handles[4]]


def test_stages_are_told_a_requests_token_and_the_drafts_behind_it():
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    names = ("plain", "drafted")
    tracker.advance(0, scheduled(*(new_request(name, [1, 2], prefill=[1, 2]) for name in names)))
    tracker.record(0, [("plain", [5]), ("drafted", [6])])
    second = SchedulerOutput.make_empty()
    cached = second.scheduled_cached_reqs = CachedRequestData.make_empty()
    for name in names:
        cached.req_ids.append(name)
        cached.num_computed_tokens.append(2)
        cached.num_output_tokens.append(1)
    second.num_scheduled_tokens = {"plain": 1, "drafted": 3}
    second.scheduled_spec_decode_tokens = {"drafted": [7, 8]}
    tracker.advance(1, second)
    assert cached.new_token_ids == [[5], [6, 7, 8]]


def test_a_token_behind_a_prompt_of_embeddings_is_told():
    """Stages before the last have it from the scheduling output alone."""
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    tracker.draws = "off"
    new, second = new_request("a", [], prefill=[0, 0, 0]), SchedulerOutput.make_empty()
    new.prompt_token_ids, new.prompt_embeds = None, torch.zeros(3, 4)
    tracker.advance(0, scheduled(new))
    tracker.record(0, [("a", [7])])
    cached = second.scheduled_cached_reqs = CachedRequestData.make_empty()
    cached.req_ids.append("a")
    cached.num_computed_tokens.append(3)
    cached.num_output_tokens.append(1)
    second.num_scheduled_tokens["a"] = 1
    tracker.advance(1, second)
    assert cached.new_token_ids == [[7]]


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 7}, True),  # vLLM takes these back
        ({"temperature": 0.3, "seed": 2**63 + 1, "stop": ["a"], "max_tokens": 3}, True),
        ({"prompt_logprobs": 2, "top_k": -1}, True),
        ({"top_k": 7}, False),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.1}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "logprobs": 0}, False),
        ({"temperature": 0.0, "min_tokens": 2}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"structured_outputs": StructuredOutputsParams(choice=["a"])}, False),
    ],
)
def test_a_requests_place_follows_from_its_own_parameters(params, plain):
    assert is_plain(SamplingParams(**params)) is plain


@pytest.mark.parametrize("seed", [None, 5])
def test_requests_without_a_seed_get_one_of_their_own(seed):
    from sipipe.engine.iteration.requests import sequence_params

    found = sequence_params(SamplingParams(seed=seed), 77)
    assert found.seed == (77 if seed is None else seed)


def arrive(client_ids, engine_seed=0, per_row=False):
    """The seeds of requests that vLLM's front end was given with these ids, in this order."""
    tracker = RequestTracker(engine_seed=engine_seed, balancer=Balancer(1, vocab_size=1000))
    tracker.draws = "per_row" if per_row else "on"
    params = SamplingParams()
    new = []
    for client_id in client_ids:
        request = SimpleNamespace(request_id=client_id, external_req_id=None)
        InputProcessor.assign_request_id(request)
        tracker.arrived(request.request_id)
        tracker.arrived(request.request_id)  # more of its prompt came
        new.append(new_request(request.request_id, [1], params=params))
    output = scheduled(*reversed(new))  # the order of scheduling does not matter
    step = tracker.advance(0, output).step
    assert params.seed is None
    told = [one.sampling_params for one in output.scheduled_new_reqs]
    return [one.seed for one in reversed(told if per_row else [a.params for a in step.added])]


def test_the_engines_seed_and_the_clients_ids_or_the_order_of_arrival_decide_seeds():
    offline = ["0", "1", "2", "0_3", "1_3"]
    assert arrive(offline) == arrive(offline) == arrive(offline, per_row=True)
    assert set(arrive(offline)).isdisjoint(arrive(offline, engine_seed=1))
    named = ["cmpl-mine-0", "chatcmpl-9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d", "0_cmpl-mine-1"]
    assert arrive(named) == arrive(named[::-1])[::-1]
    seeds = [arrive([f"cmpl-{random_uuid()}-0", "cmpl-mine-0", f"0_chatcmpl-{random_uuid()}"])
             for _ in range(3)]  # fmt: skip
    assert seeds[0] == seeds[1] == seeds[2]
    assert len(set(seeds[0] + arrive(offline))) == 8
    assert seeds[0][1] == arrive(named)[0]


def test_requests_that_a_proxy_gave_one_id_do_not_draw_alike(monkeypatch):
    again = ["cmpl-mine-0", "cmpl-other-0", "cmpl-mine-0", "cmpl-mine-0"]
    first = arrive(again)
    assert len(set(first)) == 4
    assert first == arrive(again)
    assert first[:2] == arrive(again[:2])
    monkeypatch.setattr(
        "sipipe.engine.iteration.request_names.MOST_IDS", 1
    )  # the oldest is forgotten
    assert arrive(again)[2] == first[0]


def test_scores_of_a_prompt_that_were_dropped_with_its_token_are_awaited_again():
    """As vLLM drops them where its prefix cache is reset: no token is held, and it begins anew."""
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    for iteration in (0, 1):
        asked = new_request("a", [1, 2], prefill=[1, 2], params=SamplingParams(prompt_logprobs=1))
        assert tracker.advance(iteration, scheduled(asked)).prompt_logprobs == ("a",)
    again = new_request("a", [1, 2], prefill=[1, 2, 3])
    assert tracker.advance(2, scheduled(again)).prompt_logprobs == ()
