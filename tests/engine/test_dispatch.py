"""What is published of scheduling outputs, and when."""

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.engine.dispatch import Dispatcher
from sipipe.engine.iterations import Iterations
from sipipe.engine.requests import Work
from sipipe.messages.header import Kind
from sipipe.messages.step import Grammar, Step


def make(published):
    return Dispatcher(
        SimpleNamespace(order=nullcontext(), publish=lambda *_, **__: None),
        Iterations(2, 99),
        Tracker(published),
        None,
        SimpleNamespace(record=lambda *_, **__: None, live=SimpleNamespace(set=lambda *_: None)),
        empty=False,
    )


def test_everything_of_empty_outputs_is_carried():
    published = []
    dispatcher = make(published)
    first, second, third, fourth = (SchedulerOutput.make_empty() for _ in range(4))
    first.finished_req_ids, first.preempted_req_ids = {"a"}, {"b"}
    first.new_block_ids_to_zero = [1, 2]
    second.free_encoder_mm_hashes, second.kv_cache_block_copies = ["h"], ["copy"]
    second.encoder_input_updates = {"c": {0: "item"}}  # vLLM 0.33
    for output in (third, fourth):
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"d": 1}, 1
    third.finished_req_ids, third.new_block_ids_to_zero = {"e"}, [3]
    assert [dispatcher.publish(o) for o in (first, second, third, fourth)] == [
        False,
        False,
        True,
        True,
    ]
    assert published == [third, fourth]
    assert third.finished_req_ids == {"a", "e"}
    assert third.preempted_req_ids == {"b"}
    assert third.new_block_ids_to_zero == [1, 2, 3]
    assert third.free_encoder_mm_hashes == ["h"]
    assert third.kv_cache_block_copies == ["copy"]
    assert third.encoder_input_updates == {"c": {0: "item"}}
    assert fourth.finished_req_ids == set(), "once"
    assert fourth.new_block_ids_to_zero is None


def test_each_step_of_auxiliary_outputs_is_told():
    """Routed experts: stock tells workers of a request's end in an output without tokens."""
    published = []
    dispatcher = make(published)

    def output(generation, over=(), tokens=0):
        made = SchedulerOutput.make_empty()
        made.aux_output_connector_metadata = AuxOutputConnectorMetadata(
            generation, {"d": 0} if tokens else {}, {}, tuple(over)
        )
        made.num_scheduled_tokens = {"d": tokens} if tokens else {}
        made.total_num_scheduled_tokens = tokens
        return made

    ends, nothing, ends_too = output(0, ["z"]), output(1), output(1, ["a"])
    for one in (ends, nothing, ends_too):
        assert not dispatcher.publish(one)
    for _ in range(2):
        assert dispatcher.publish(output(1, tokens=1))
    told = [ends.aux_output_connector_metadata, ends_too.aux_output_connector_metadata]
    assert published[0].earlier_aux_metadata == told
    assert not hasattr(published[1], "earlier_aux_metadata")
    sent = pickle.loads(pickle.dumps(published[0]))
    assert [one.finished_requests for one in sent.earlier_aux_metadata] == [("z",), ("a",)]


def test_what_waits_is_published_with_its_bitmask_when_its_time_has_come():
    """One slot: EngineCore has asked for the second iteration's tokens before the first has them."""
    sent, iterations = [], Iterations(1, 99)
    step = Step(0, grammar=True)
    bus = SimpleNamespace(
        order=nullcontext(), publish=lambda kind, number, *_, **__: sent.append((kind, number))
    )
    tracker = SimpleNamespace(
        advance=lambda *_: Work(step=step, samplers=(0,)),
        grammar=lambda *_: Grammar(0, b"", 0, b""),
    )
    gather = SimpleNamespace(expect=lambda *_: None)
    telemetry = Mock()
    dispatcher = Dispatcher(bus, iterations, tracker, gather, telemetry, empty=False)
    futures = []
    for turn in range(2):
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = 1
        iterations.scheduled(output, 0, turn, 0, 0)
        assert dispatcher.publish(output)
        futures.append(dispatcher.publish_grammar(None))
    first = [(Kind.SCHEDULE, 0), (Kind.GRAMMAR, 0)]
    assert sent == first
    done = iterations.deliver(0, tokens=[])
    assert done.future is futures[0]
    dispatcher.go_on()
    assert sent == first
    iterations.leave(done)
    dispatcher.go_on()
    assert sent == [*first, (Kind.SCHEDULE, 1), (Kind.GRAMMAR, 1)]
    assert iterations.deliver(1, tokens=[]).future is futures[1]


class Tracker:
    def __init__(self, published):
        self._published = published

    def advance(self, number, output):
        self._published.append(output)
        return Work()

    def __len__(self):
        return 0
