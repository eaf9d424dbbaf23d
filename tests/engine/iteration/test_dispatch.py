"""What is published of scheduling outputs, and when."""

import pickle
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from tests.engine.iteration.test_iterations import decodes
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from sipipe.engine.iteration.bus import Bus
from sipipe.engine.iteration.dispatch import Dispatcher
from sipipe.engine.iteration.iteration import Scheduled
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.work import Work
from sipipe.errors import WorkerDiedError
from sipipe.ipc.errors import ChannelClosed
from sipipe.messages.header import Kind
from sipipe.messages.step import Grammar, Step, int32_bytes


def make(tracker, slots=1, publish=lambda *_, **__: None, bus=None):
    """A dispatcher, and its iterations. Without a ``bus``, its messages are those of ``publish``."""
    bus = bus or SimpleNamespace(order=threading.RLock(), publish=publish)
    gather, iterations = SimpleNamespace(expect=lambda *_: None), Iterations(slots, 99)
    dispatcher = Dispatcher(
        bus=bus,
        iterations=iterations,
        tracker=tracker,
        gather=gather,
        telemetry=Mock(),
        empty=False,
    )
    return dispatcher, iterations


def test_everything_of_empty_outputs_is_carried():
    published = []
    tracker = SimpleNamespace(advance=lambda _, output: published.append(output) or Work())
    dispatcher, _ = make(tracker, slots=2)
    first, second, third, fourth = (SchedulerOutput.make_empty() for _ in range(4))
    first.finished_req_ids, first.preempted_req_ids = {"a"}, {"b"}
    first.new_block_ids_to_zero = [1, 2]
    second.free_encoder_mm_hashes, second.kv_cache_block_copies = ["h"], ["copy"]
    for output in (third, fourth):
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"d": 1}, 1
    third.finished_req_ids, third.new_block_ids_to_zero = {"e"}, [3]
    said = [dispatcher.publish(output) for output in (first, second, third, fourth)]
    assert said == [False, False, True, True]
    assert published == [third, fourth]
    assert third.finished_req_ids == {"a", "e"}
    assert third.preempted_req_ids == {"b"}
    assert third.new_block_ids_to_zero == [1, 2, 3]
    assert third.free_encoder_mm_hashes == ["h"]
    assert third.kv_cache_block_copies == ["copy"]
    assert fourth.finished_req_ids == set(), "once"
    assert fourth.new_block_ids_to_zero is None


def test_what_leaves_while_the_engine_is_paused_is_kept_in_one():
    dispatcher, _ = make(SimpleNamespace(advance=lambda *_: Work()), slots=2)
    for number in range(50):
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {f"r{number}"}
        assert not dispatcher.publish(output)
    kept = [value for value in vars(dispatcher).values() if isinstance(value, SchedulerOutput)]
    assert [len(output.finished_req_ids) for output in kept] == [50]
    assert not [value for value in vars(dispatcher).values() if isinstance(value, list)]


def test_what_is_published_while_the_engine_ends_fails_with_its_cause():
    """Whatever closes the channel has resolved what is out before, or will."""

    class Ending:
        def publish(self, _):
            iterations.fail(WorkerDiedError("host 1 was ended"))
            raise ChannelClosed("bic-i is closed")

    tracker = SimpleNamespace(advance=lambda *_: Work())
    dispatcher, iterations = make(tracker, bus=Bus([Ending()]))
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"d": 1}, 1
    assert dispatcher.publish(output)
    with pytest.raises(RuntimeError, match="host 1 was ended"):
        dispatcher.publish_grammar(None).result(0)


def test_each_step_of_auxiliary_outputs_is_told():
    """Routed experts: stock tells workers of a request's end in an output without tokens."""
    published = []
    tracker = SimpleNamespace(advance=lambda _, output: published.append(output) or Work())
    dispatcher, _ = make(tracker, slots=2)

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


class Held:
    """A dispatcher of one slot; the bitmasks that it sent, and what else, in order."""

    def __init__(self):
        self.sent, self.masks, self.turn = [], [], 0
        work = Work(step=Step(0, grammar=True), samplers=(0,))
        tracker = SimpleNamespace(advance=lambda *_: work, grammar=self._grammar)
        self.order = threading.RLock()
        bus = SimpleNamespace(order=self.order, publish=self._publish)
        self.dispatcher, self.iterations = make(tracker, bus=bus)

    def _publish(self, kind, number, *_, **__):
        self.sent.append((kind, number))

    def _grammar(self, number, output):
        self.masks.append(output.grammar_bitmask.tolist())
        return Grammar(number, b"", 0, b"")

    def give(self, mask, new=()):
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = 1
        output.scheduled_new_reqs = [*new]
        self.iterations.record(Scheduled(output=output, slot=0, turn=self.turn))
        self.turn += 1
        assert self.dispatcher.publish(output)
        return self.dispatcher.publish_grammar(GrammarOutput([], mask, []))

    def draw(self, number):
        done = self.iterations.deliver(number, tokens=[])
        self.iterations.leave(done)
        return done.future


def test_a_planned_iteration_is_published_with_its_tokens_alone():
    sent, work = [], Work(samplers=(0,))

    def advance(_, output):
        output.scheduled_cached_reqs.new_token_ids = [[7], [8]]
        return work

    tracker = SimpleNamespace(advance=advance)
    dispatcher, iterations = make(tracker, publish=lambda *told, **__: sent.append(told))
    for turn in range(2):
        output = decodes("a", "b")
        iterations.record(Scheduled(output=output, slot=0, turn=turn))
        assert dispatcher.publish(output)
    assert [told[:2] for told in sent] == [(Kind.SCHEDULE, 0), (Kind.PLAN, 1)]
    early = pickle.loads(sent[1][2][1], buffers=sent[1][2][2:])
    assert early.num_scheduled_tokens == {"a": 1, "b": 1}
    assert early.scheduled_cached_reqs.new_token_ids == []
    iterations.leave(iterations.deliver(0, tokens=[]))
    dispatcher.publish_due(wait=False)
    assert sent[2][:2] == (Kind.SCHEDULE, 1)
    assert sent[2][2][1:] == [int32_bytes([7, 8])]


@pytest.mark.parametrize("asks", [0, 3])
def test_while_a_head_may_be_asked_none_is_planned_and_each_says_behind_how_many_requests_it_is(
    asks,
):
    """A planned one is published before the tracker has followed it: a request for drafts behind it could
    be for rows of a request that it ends, whose blocks it has given to another."""
    sent = []

    def advance(_, output):
        output.scheduled_cached_reqs.new_token_ids = [[7]]
        return Work(samplers=(0,))

    tracker = SimpleNamespace(advance=advance)
    dispatcher, iterations = make(tracker, publish=lambda *told, **__: sent.append(told[:2]))
    dispatcher.head_drafts = SimpleNamespace(sent=lambda: 1 + len(sent))
    outputs = [decodes("a"), decodes("a")]
    for turn, output in enumerate(outputs):
        iterations.record(Scheduled(output=output, slot=0, turn=turn, asks=asks))
        assert dispatcher.publish(output)
    plan = [] if asks else [(Kind.PLAN, 1)]
    assert sent == [(Kind.SCHEDULE, 0), *plan]
    iterations.leave(iterations.deliver(0, tokens=[]))
    dispatcher.publish_due(wait=False)
    assert sent == [(Kind.SCHEDULE, 0), *plan, (Kind.SCHEDULE, 1)]
    assert [output.drafts_asked for output in outputs] == [1, 2]


def test_tokens_that_come_while_a_plan_is_published_are_not_left_lying():
    """Who brings them finds the order taken, and leaves."""
    sent, work = [], Work(samplers=(0,))

    def publish(kind, number, *_, **__):
        sent.append((kind, number))
        if kind is Kind.PLAN:
            iterations.leave(iterations.deliver(number - 1, tokens=[]))
            other = threading.Thread(target=dispatcher.publish_due, args=(False,))
            other.start()
            other.join()

    tracker = SimpleNamespace(advance=lambda *_: work)
    dispatcher, iterations = make(tracker, publish=publish)
    for turn in range(2):
        output = decodes("a")
        iterations.record(Scheduled(output=output, slot=0, turn=turn))
        assert dispatcher.publish(output)
    assert sent == [(Kind.SCHEDULE, 0), (Kind.PLAN, 1), (Kind.SCHEDULE, 1)]


FIRST = [(Kind.SCHEDULE, 0), (Kind.GRAMMAR, 0)]
SECOND = [(Kind.SCHEDULE, 1), (Kind.GRAMMAR, 1)]


def test_what_waits_is_published_with_its_bitmask_when_its_time_has_come():
    """EngineCore has asked for the second iteration's tokens before the first has them; vLLM's array
    of bitmasks is one for all."""
    held, mask = Held(), np.zeros((1, 1), np.int32)
    futures = [held.give(mask)]
    mask[0, 0] = 1
    futures.append(held.give(mask))
    mask[0, 0] = 2
    held.dispatcher.publish_due(wait=False)
    assert held.sent == FIRST
    assert held.draw(0) is futures[0]
    held.dispatcher.publish_due(wait=False)
    assert held.sent == FIRST + SECOND
    assert held.masks == [[[0]], [[1]]]
    assert held.draw(1) is futures[1]


def test_who_brings_tokens_leaves_prompts_and_a_lock_to_the_engines_thread():
    held, mask = Held(), np.zeros((1, 1), np.int32)
    held.give(mask)
    held.give(mask, new=["with an image"])
    held.give(mask)
    held.draw(0)
    held.dispatcher.publish_due(wait=False)
    assert held.sent == FIRST
    held.dispatcher.publish_due()
    assert held.sent == FIRST + SECOND
    held.draw(1)
    taken, leave = threading.Event(), threading.Event()

    def replace_a_sampler():
        with held.order:
            taken.set()
            leave.wait(30)

    replacing = threading.Thread(target=replace_a_sampler)
    replacing.start()
    assert taken.wait(30)
    held.dispatcher.publish_due(wait=False)
    assert held.sent == FIRST + SECOND
    leave.set()
    replacing.join(30)
    held.dispatcher.publish_all()
    assert held.sent[-1] == (Kind.GRAMMAR, 2)


def test_a_call_comes_behind_all_that_is_scheduled():
    held, mask = Held(), np.zeros((1, 1), np.int32)
    held.give(mask)
    held.give(mask)
    calling = threading.Thread(target=held.dispatcher.publish_all)
    calling.start()
    assert held.sent == FIRST
    held.draw(0)
    calling.join(30)
    assert held.sent == FIRST + SECOND
