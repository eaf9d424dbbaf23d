"""Scheduling outputs without tokens: what they tell workers goes with the next one."""

from contextlib import nullcontext
from types import SimpleNamespace

from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.engine.dispatch import Dispatcher
from sipipe.engine.iterations import Iterations
from sipipe.engine.requests import Work


def test_everything_of_empty_outputs_is_carried():
    published = []
    dispatcher = Dispatcher(
        SimpleNamespace(order=nullcontext(), publish=lambda *_, **__: None),
        Iterations(2, 99),
        Tracker(published),
        None,
        SimpleNamespace(record=lambda *_, **__: None, live=SimpleNamespace(set=lambda *_: None)),
        empty=False,
    )
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


class Tracker:
    def __init__(self, published):
        self._published = published

    def advance(self, number, output):
        self._published.append(output)
        return Work()

    def __len__(self):
        return 0
