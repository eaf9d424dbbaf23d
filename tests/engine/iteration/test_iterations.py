"""The table that scheduler and executor share: who names an iteration, when it is complete."""

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from sipipe.engine.iteration import stall
from sipipe.engine.iteration.calls import Calls
from sipipe.engine.iteration.iteration import Scheduled
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.resolve import NO_ANSWER, build_output
from sipipe.engine.iteration.stall import StallClock, StallWatch
from sipipe.engine.iteration.work import Work
from sipipe.errors import StallError
from sipipe.messages.replies import IterationReport, Status
from sipipe.messages.step import Logprobs, Sampled, int32_bytes

WORKERS = ["stage0.0", "stage1.0"]
DRAWN = Work(request_ids=["a", "b", "c"], sampled=["a", "c"], samplers=(0, 1))


def begin(iterations, work=DRAWN, output=None):
    iterations.enter(output or SchedulerOutput.make_empty())
    return iterations.begin(lambda number, output: work)


def drawn(iterations, number):
    """All of ``number`` is in, and it leaves."""
    iteration = iterations.deliver(number, tokens=[])
    iterations.leave(iteration)
    return iteration


def said(number, tokens=()):
    return IterationReport(iteration=number, prompt_logprobs={}, tokens=tokens)


def sampled(row, token, errors=()):
    return Sampled(0, int32_bytes([row]), int32_bytes([token]), errors=list(errors))


def test_a_scheduler_of_the_users_own_takes_slots_in_turn():
    iterations = Iterations(3, 99)
    assert [begin(iterations).slot for _ in range(4)] == [0, 1, 2, 0]
    assert iterations.finish(SchedulerOutput.make_empty()) is None


def test_our_scheduler_names_the_slot_and_finds_the_record_again():
    iterations = Iterations(3, 99)
    output = SchedulerOutput.make_empty()
    iterations.record(Scheduled(output=output, slot=2, turn=3, began_ns=10, ended_ns=20))
    iteration = begin(iterations, output=output)
    assert (iteration.number, iteration.slot) == (0, 2)
    assert iterations.finish(output) is iteration
    assert iterations.finish(output) is None


def test_an_iteration_is_complete_when_all_is_in_that_it_waits_for():
    iterations = Iterations(3, 99)
    first = begin(iterations)
    assert first.late == "samplers 0, 1"
    both = begin(iterations, replace(DRAWN, prompt_logprobs=("a",)))
    nothing = begin(iterations, Work(request_ids=["a"]))
    assert nothing.late == "the last stage"
    assert [i.number for i in iterations.undrawn(1)] == [0, 1]
    assert iterations.deliver(0, tokens=[]) is first
    assert iterations.deliver(0, tokens=[]) is None  # once
    assert iterations.deliver(1, report=said(1)) is None
    assert iterations.deliver(1, tokens=[]) is both
    assert iterations.deliver(2, report=said(2)) is nothing
    assert len(iterations) == 3
    for iteration in (first, both, nothing):
        iterations.leave(iteration)
    assert len(iterations) == 0


def test_an_iteration_begins_when_its_slots_last_turn_has_left():
    """Three slots, of which one is empty: turns 2 and 5."""
    iterations = Iterations(3, 99)
    outputs = {turn: SchedulerOutput.make_empty() for turn in (0, 1, 3, 4)}
    for turn, output in outputs.items():
        iterations.record(Scheduled(output=output, slot=turn % 3, turn=turn))
        iterations.enter(output)
    follow = Mock(return_value=DRAWN)
    assert [iterations.begin(follow).number for _ in range(2)] == [0, 1]
    assert iterations.begin(follow) is None
    last = iterations.deliver(1, tokens=[])  # quicker than the one before
    assert iterations.begin(follow) is None
    first = iterations.deliver(0, tokens=[])
    assert iterations.begin(follow) is None, "who follows requests does not know its tokens yet"
    iterations.leave(first)
    assert iterations.begin(follow).scheduled.turn == 3
    assert iterations.begin(follow) is None
    iterations.leave(last)
    assert iterations.begin(follow).scheduled.turn == 4
    assert [call.args for call in follow.call_args_list] == list(enumerate(outputs.values()))


def decodes(*names):
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs.req_ids = [*names]
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = len(names)
    return output


def test_the_first_that_waits_is_planned_once_with_the_number_that_it_gets():
    iterations = Iterations(1, 99)
    for turn in range(3):
        output = decodes("a", "b")
        iterations.record(Scheduled(output=output, slot=0, turn=turn))
        iterations.enter(output)
    assert iterations.begin(lambda *_: DRAWN).number == 0
    number, planned = iterations.plan()
    assert (number, planned.number, planned.on_bus.planned) == (1, -1, True)
    assert iterations.plan() is None
    drawn(iterations, 0)
    assert iterations.begin(lambda *_: DRAWN) is planned
    assert planned.number == 1
    assert iterations.plan()[0] == 2


def test_what_has_more_than_a_token_of_each_is_not_planned():
    prompt, order, draft = decodes("a"), decodes("a", "b"), decodes("a")
    prompt.scheduled_new_reqs = ["b"]
    order.num_scheduled_tokens = {"b": 1, "a": 1}
    draft.total_num_scheduled_tokens = 2
    for output in (prompt, order, draft):
        iterations = Iterations(1, 99)
        iterations.record(Scheduled(output=output, slot=0))
        iterations.enter(output)
        assert iterations.plan() is None
    iterations = Iterations(1, 99)
    iterations.enter(decodes("a"))  # of a scheduler that has no slots
    assert iterations.plan() is None


def test_what_runs_and_what_waits_fail_with_the_engine():
    iterations = Iterations(1, 99)
    for turn in range(2):
        output = SchedulerOutput.make_empty()
        iterations.record(Scheduled(output=output, slot=0, turn=turn))
        waits = iterations.enter(output)
    first = iterations.begin(lambda *_: DRAWN)
    assert iterations.begin(lambda *_: DRAWN) is None
    iterations.fail(RuntimeError("stage1.0 died"))
    with pytest.raises(RuntimeError, match=r"iteration 0 failed: stage1\.0 died"):
        first.future.result(0)
    with pytest.raises(RuntimeError, match=r"iteration that waits failed: stage1\.0 died"):
        waits.future.result(0)
    assert iterations.begin(lambda *_: DRAWN) is None
    with pytest.raises(RuntimeError, match="executor has failed"):
        iterations.enter(output)


def test_one_that_cannot_begin_fails_with_the_engine():
    """Its requests would wait for ever, and whoever waits for its result."""
    iterations = Iterations(1, 99)
    iteration = iterations.enter(SchedulerOutput.make_empty())

    def follow(*_):
        raise MemoryError

    with pytest.raises(MemoryError):
        iterations.begin(follow)
    iterations.fail(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        iteration.future.result(0)


def test_drafts_that_are_in_flight():
    iterations = Iterations(3, 99)
    output = SchedulerOutput.make_empty()
    output.scheduled_spec_decode_tokens = {"a": [1, 2], "b": [3]}
    begin(iterations, output=output)
    begin(iterations)
    assert iterations.drafts() == 3
    drawn(iterations, 0)
    assert iterations.drafts() == 0


def test_what_is_said_of_a_prompt_reaches_vllm():
    work = Work(request_ids=["a", "b"], prompt_logprobs=("a",))
    iteration = begin(Iterations(3, 9), work)
    iteration.answers.report = IterationReport(
        iteration=0, prompt_logprobs={"a": "likely"}, prompt_scores={"b": "named"}
    )
    found = build_output(iteration)
    assert found.prompt_logprobs_dict == {"a": "likely"}
    assert found.prompt_token_id_logprobs_dict == {"b": "named"}


def test_drafts_of_the_same_pass_are_those_of_requests_with_a_token():
    """One is amid its prompt, and of one nothing came."""
    work = Work(request_ids=["a", "b", "c"], on_device=["a", "c"])
    iteration = begin(Iterations(3, 9), work)
    output = ModelRunnerOutput(
        req_ids=["c", "b", "a"],
        req_id_to_index={"c": 0, "b": 1, "a": 2},
        sampled_token_ids=[[5, 6], [], []],
    )
    drafts = {"a": [1], "b": [2], "c": [3]}
    iteration.answers.report = IterationReport(iteration=0, output=output, drafts=drafts)
    assert build_output(iteration) is output
    assert iteration.outcome.errors == {"a": NO_ANSWER}
    assert iteration.outcome.drafts == {"c": [3]}
    assert iteration.outcome.drawn == {"c": 2}


def test_rows_of_both_places_are_waited_for_and_put_together():
    iterations = Iterations(3, 24)
    work = Work(
        request_ids=["a", "b", "c", "d"], sampled=["c"], on_device=["d", "a"], samplers=(0,)
    )
    mixed = begin(iterations, work)
    assert mixed.late == "the last stage and samplers 0"
    assert iterations.deliver(0, report=said(0, [7, 8])) is None
    assert mixed.late == "samplers 0"
    assert [i.number for i in iterations.undrawn(0)] == [0]
    assert iterations.deliver(0, tokens=[sampled(0, 0)]) is mixed
    assert build_output(mixed).sampled_token_ids == [[8], [], [0], [7]]  # 0 is a token, too
    alone = begin(iterations, replace(work, sampled=[], samplers=()))
    assert iterations.deliver(1, report=said(1, [7, 8])) is alone
    assert build_output(alone).sampled_token_ids == [[8], [], [], [7]]
    assert mixed.outcome.drawn == {"a": 1, "c": 1, "d": 1}
    assert alone.outcome.drawn == {"a": 1, "d": 1}


def test_an_output_has_every_row_of_a_request_in_order_and_its_own_logprobs():
    """Two samplers: rows 0, 2 and 3 are one request's, of which the last was not drawn."""
    work = Work(request_ids=["prompt", "b", "a"], sampled=["a", "b", "a", "a"], samplers=(0, 1))
    iteration = begin(Iterations(3, 99), work)
    likely = {
        row: Logprobs(row, rank, int32_bytes(ids), np.array(values, "<f4").tobytes())
        for row, ids, values, rank in ((0, [5, 9], [-0.5, -1], 1), (2, [0, 5], [-2, -0.1], 2))
    }
    more = {"logprobs": list(likely.values()), "drafts": [(3, int32_bytes([7, 0]))]}
    first = Sampled(0, int32_bytes([0, 2, 3]), int32_bytes([5, 0, -1]), **more)
    iteration.answers.tokens = [first, sampled(1, 0)]
    found = build_output(iteration)
    assert found.sampled_token_ids == [[], [0], [5, 0]]
    assert (found.req_ids, found.req_id_to_index) == (
        ["prompt", "b", "a"],
        {"prompt": 0, "b": 1, "a": 2},
    )
    both = found.logprobs.slice_request(2, 2)
    assert both.logprob_token_ids.tolist() == [[5, 9], [0, 5]]
    assert both.logprobs.tolist() == [[-0.5, -1.0], [-2.0, np.float32(-0.1)]]
    assert both.sampled_token_ranks.tolist() == [1, 2]
    assert found.logprobs.slice_request(2, 1).logprob_token_ids.tolist() == [[5, 9]]
    assert found.logprobs.slice_request(0, 0) is None
    assert iteration.outcome.drafts == {"a": [7, 0]}
    assert not iteration.outcome.errors


@pytest.mark.parametrize("by_device", [False, True])
def test_a_request_whose_token_is_lost_without_a_word_fails_by_name(by_device):
    """It would wait for ever, and a later iteration would lack its token."""
    iteration = begin(Iterations(3, 99), DRAWN)
    if by_device:
        output = ModelRunnerOutput(
            req_ids=DRAWN.request_ids,
            req_id_to_index={name: index for index, name in enumerate(DRAWN.request_ids)},
            sampled_token_ids=[[5], [], []],
        )
        iteration.answers.report = IterationReport(iteration=0, output=output)
    else:
        iteration.answers.tokens = [Sampled(0, int32_bytes([0]), int32_bytes([5]))]
    assert build_output(iteration).sampled_token_ids == [[5], [], []]
    assert iteration.outcome.errors == {"c": NO_ANSWER}


def test_requests_without_a_token_are_errors_of_their_own():
    iterations = Iterations(3, 99)
    iteration = begin(iterations, DRAWN)
    bad = Sampled(0, b"", b"", errors=[(0, "bad")])
    iterations.deliver(0, tokens=[bad, sampled(1, -1, [(1, "NaN")])])
    output = build_output(iteration)
    assert output.sampled_token_ids == [[], [], []]
    assert iteration.outcome.errors == {"a": "bad", "c": "NaN"}


def test_a_row_behind_drafts_fails_no_request_that_has_a_token():
    """The token may end it; a single step would not have come to that row."""
    work = Work(request_ids=["a", "b"], sampled=["a", "a", "b", "b"], samplers=(0,))
    iteration = begin(Iterations(3, 9), work)
    errors = [(1, "NaN"), (2, "NaN")]
    iteration.answers.tokens = [
        Sampled(0, int32_bytes([0, 1, 2]), int32_bytes([5, -1, -1]), errors=errors)
    ]
    assert build_output(iteration).sampled_token_ids == [[5], []]
    assert iteration.outcome.errors == {"b": "NaN"}
    iteration.outcome.errors.clear()
    iteration.answers.tokens = [
        Sampled(0, int32_bytes([0, 2]), int32_bytes([5, 6]), errors=errors[:1])
    ]
    assert build_output(iteration).sampled_token_ids == [[5], [6]]
    assert not iteration.outcome.errors
    assert iteration.outcome.tainted, "blocks with NaN are zeroed all the same"


class Watched:
    """A stall watch of 100 s over two workers that answer when the test says so."""

    def __init__(self):
        self.errors, self.asked, self.shown, self.clock = [], 0, [], StallClock()
        self.iterations = Iterations(3, 99, self.clock.now)
        self.calls = Calls(SimpleNamespace(publish=lambda *_: None), WORKERS, self.clock.now)
        self.watch = StallWatch(
            iterations=self.iterations,
            calls=self.calls,
            workers=WORKERS,
            ask=self.ask,
            clock=self.clock,
            timeout=100.0,
            fail=self.errors.append,
            show=self.shown.append,
        )

    def ask(self):
        self.asked += 1


def test_a_stage_that_does_not_answer_while_work_is_late_is_a_stall(monkeypatch):
    """1. Not late. 2. Late, and asked. 3. One does not answer. 4. It does again. 5. All is done."""
    watched = Watched()
    now = time.monotonic()
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now))

    def turn(*answering):
        nonlocal now
        for worker in answering:
            watched.watch.heard(worker, Status("runs iteration 0"))
        pause = watched.watch.turn()
        now += 2.0
        return pause, watched.asked, watched.shown[-1:]

    assert turn() == (5.0, 0, [False])
    iteration = begin(watched.iterations)
    iteration.begun = replace(iteration.begun, began=now)
    assert turn()[1:] == (0, [False])
    now += 4.5
    assert turn()[1:] == (0, [False])
    now += 4.5
    assert turn() == (2.0, 1, [False])
    assert turn(*WORKERS) == (2.0, 2, [False])
    assert turn(WORKERS[0]) == (2.0, 3, [True])
    assert turn() == (2.0, 4, [True])
    assert turn(*WORKERS) == (2.0, 5, [False])
    assert turn(WORKERS[0]) == (2.0, 6, [True])
    for sampler in (0, 1):
        done = watched.iterations.deliver(0, tokens={sampler: sampled(sampler, 1)})
        if done is not None:
            watched.iterations.leave(done)
    assert turn() == (5.0, 6, [False])
    assert not watched.errors


def test_any_other_call_may_take_as_long_as_its_workers_answer(monkeypatch):
    watched = Watched()
    watched.calls.call("save_it_all")
    for _ in range(3):
        watched.calls.oldest().began -= 101.0
        assert watched.watch.turn() > 0
        for worker in WORKERS:
            watched.watch.heard(worker, Status("runs save_it_all"))
        watched.watch.turn()
    assert (watched.asked, watched.errors) == (3, [])
    watched.calls.oldest().began -= 101.0
    watched.watch.turn()
    watched.watch.heard("stage0.0", Status("runs save_it_all"))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0)
    monkeypatch.setattr(stall, "time", later)
    watched.watch.turn()
    assert "save_it_all waits for stage0.0, stage1.0" in str(watched.errors[0])
    assert "stage1.0 does not answer" in str(watched.errors[0])


def make_older(iteration, seconds):
    iteration.begun = replace(iteration.begun, began=iteration.began - seconds)


def test_a_stall_says_what_each_worker_does():
    watched = Watched()
    iterations, watch, errors = watched.iterations, watched.watch, watched.errors
    assert watch.turn() > 0
    make_older(begin(iterations), 99.0)
    assert 0 < watch.turn() < 2
    make_older(iterations.oldest(), 2.0)
    assert watched.asked == 1  # as it was late
    watch.turn()
    assert watched.asked == 2
    watch.heard("stage0.0", Status("waits for hidden states"))
    watch.turn()
    assert not errors
    watch.heard("stage1.0", Status("runs iteration 0"))
    watch.turn()
    (error,) = errors
    assert isinstance(error, StallError)
    assert "no progress for 100 s: iteration 0 waits for samplers 0, 1" in str(error)
    assert "stage0.0 waits for hidden states; stage1.0 runs iteration 0" in str(error)
    assert "stall_timeout" in str(error)


def test_the_stall_clock_stands_still_while_a_sampler_is_replaced(monkeypatch):
    """Whatever it takes, and whoever else dies meanwhile; but not longer than it was said."""
    watched = Watched()
    now = time.monotonic()
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now))
    begin(watched.iterations)
    watched.watch.turn()

    def fails_after(seconds):
        nonlocal now
        for step in [5.0] * int(seconds // 5) + [seconds % 5]:
            now += step
            watched.watch.turn()
            for worker in WORKERS:
                watched.watch.heard(worker, Status("waits"))
        watched.watch.turn()
        return bool(watched.errors)

    assert not fails_after(60.0)
    watched.clock.stop("sampler0", 500.0)
    assert not fails_after(200.0)
    watched.clock.stop("sampler1", 500.0)
    watched.clock.go_on("sampler0")
    assert not fails_after(200.0)
    watched.clock.go_on("sampler1")
    assert not fails_after(39.0)
    watched.clock.stop("sampler0", 500.0)
    watched.clock.stop("sampler0", 500.0)  # since the first
    assert not fails_after(499.0)
    assert fails_after(2.5)
    assert "no progress for 100 s" in str(watched.errors[0])


def test_a_pause_of_the_engines_process_is_not_the_workers(monkeypatch):
    """After it an iteration has nearly its whole time."""
    watched, now = Watched(), time.monotonic()
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now))
    begin(watched.iterations)
    watched.watch.turn()
    now += 1000.0
    assert watched.watch.turn() > 0
    for _ in range(17):
        now += 5.0
        watched.watch.turn()
        watched.watch.heard("stage0.0", Status("computes"))
        watched.watch.heard("stage1.0", Status("computes"))
    assert not watched.errors
    for _ in range(3):
        now += 5.0
        watched.watch.turn()
    assert watched.errors
