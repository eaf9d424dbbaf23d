"""A stage of SiPipe's path, whole: both threads, preparation, links, draws, publisher, calls.

Threads are real, and stopped where one could overtake the other (:class:`Gate`).
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.arithmetic import Runner, continuation
from tests.worker.arithmetic_stages import (
    HAND_OVER,
    INFLIGHT,
    OwnInputs,
    Requests,
    Stages,
    one_by_one,
)
from tests.worker.watched_stage import TokenSafetyError
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from sipipe.errors import StallError
from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.messages.header import Header, Kind
from sipipe.worker import sampled_stage
from sipipe.worker.double_buffer import StageStoppedError, Turns
from sipipe.worker.hooks.preparation import SiPipePrepares
from sipipe.worker.inputs.prepare import InputPreparer

WHERE = {
    "prepare": (InputPreparer, "_write_layout"),  # half of a set is written
    "receive": (Receiver, "take"),
    "forward": (Runner, "forward"),
    "send": (Sender, "send"),
}
"""What a stage does with an iteration, in the order of an iteration."""


class Gate:
    """Stops each call of a function where it begins."""

    def __init__(self, monkeypatch, owner, name):
        self.reached, self._let = threading.Semaphore(0), threading.Semaphore(0)
        real = getattr(owner, name)

        def gated(*args, **kwargs):
            self.reached.release()
            assert self._let.acquire(timeout=HAND_OVER)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, gated)

    def wait(self):
        assert self.reached.acquire(timeout=HAND_OVER)

    def let(self, times=1):
        self._let.release(times)


def until(holds):
    while not holds():
        threading.Event().wait(0.001)


@pytest.fixture
def forward(monkeypatch):
    return Gate(monkeypatch, Runner, "forward")


@pytest.fixture
def beside():
    """``beside(function, *args)`` calls it in another thread; a future."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def serve(stages, iterations=120, seed=5):
    """Requests come, in chunks, decode, are preempted and go, in slots of their own; every request's
    tokens in the end."""
    rng, requests, told, done = random.Random(seed), Requests(), {}, {}
    slots = [[] for _ in range(INFLIGHT)]
    due, prompts = {}, {}

    def draw(iteration):
        samples = due.pop(iteration)
        if samples:
            for req_id, token in zip(samples, stages.draw(iteration), strict=True):
                requests.tokens[req_id].append(token)

    for iteration in range(iterations):
        if iteration >= INFLIGHT:
            draw(iteration - INFLIGHT)
        here, amounts = slots[iteration % INFLIGHT], {}
        for req_id in list(here):
            made = len(requests.tokens[req_id]) - len(prompts[req_id])
            if made >= 12:
                here.remove(req_id)
                done[req_id] = requests.tokens[req_id][len(prompts[req_id]) :]
                requests.finish(req_id)
            elif rng.random() < 0.03:
                requests.preempt(req_id)
                told[req_id] = 0
        if len(here) < 4 and rng.random() < 0.4:
            req_id = f"r{iteration}"
            prompts[req_id] = [rng.randrange(500) for _ in range(rng.randint(1, 20))]
            requests.add(req_id, prompts[req_id])
            here.append(req_id)
            told[req_id] = 0
        for req_id in here:
            if rng.random() < 0.9:  # else it sits this one out
                left = len(requests.tokens[req_id]) - told[req_id]
                amounts[req_id] = min(left, rng.choice((5, 9)))
                told[req_id] += amounts[req_id]
        output, due[iteration] = requests.schedule(amounts)
        stages.run(iteration, output, len(due[iteration]))
    for iteration in sorted(due):
        draw(iteration)
    assert done
    return {req_id: (prompts[req_id], tokens) for req_id, tokens in done.items()}


@pytest.mark.parametrize(
    ("count", "state", "sets"),
    [
        (1, DefaultModelState, 2),
        (2, DefaultModelState, 2),
        (2, DefaultModelState, 1),
        (2, DefaultModelState, 3),
        (1, OwnInputs, 2),
        (2, OwnInputs, 2),
    ],
)
def test_tokens_follow_from_their_prompts(count, state, sets, monkeypatch):
    """Whoever prepares, ahead or in turn."""
    monkeypatch.setattr(sampled_stage, "SETS", sets)
    preparing = set()
    prepare = SiPipePrepares.prepare

    def note(preparation, inputs):
        preparing.add(preparation)
        prepare(preparation, inputs)

    monkeypatch.setattr(SiPipePrepares, "prepare", note)
    with Stages(count, state=state) as stages:
        for prompt, tokens in serve(stages).values():
            assert tokens == continuation(prompt, len(tokens))
    assert stages.failed == []
    assert len(preparing) == (count if state is DefaultModelState else 0), "the rest is vLLM's"


@pytest.mark.parametrize("state", [DefaultModelState, OwnInputs])
def test_an_iteration_without_tokens_lets_requests_go(state):
    requests = Requests()
    requests.add("a", [3, 4, 5])
    with Stages(2, state=state) as stages:
        stages.run(0, requests.schedule({"a": 3})[0], 1)
        stages.draw(0)
        requests.finish("a")
        stages.run(1, requests.schedule({})[0], 0)
        for loop, runner in zip(stages.loops, stages.runners, strict=True):
            loop.call(lambda: None)
            assert runner.req_states.req_id_to_index == {}
        requests.add("b", [6, 7])
        stages.run(2, requests.schedule({"b": 2})[0], 1)
        assert stages.draw(2) == continuation([6, 7], 1)
    assert stages.failed == []


def feed(loops, iterations):
    """Hand so many iterations to these stages."""
    for iteration, output in enumerate(one_by_one(iterations)):
        for loop in loops:
            loop.double_buffer.prepare(
                Header(Kind.SCHEDULE, iteration % INFLIGHT, iteration), output
            )


# ---- two sets of input buffers ------------------------------------------------------------------


def test_the_next_inputs_are_prepared_while_the_device_runs(forward, beside, monkeypatch):
    prepared = []
    prepare = SiPipePrepares.prepare

    def note(preparation, inputs):
        prepared.append(inputs.iteration)
        prepare(preparation, inputs)

    monkeypatch.setattr(SiPipePrepares, "prepare", note)
    with Stages(1) as stages:
        [loop], [runner] = stages.loops, stages.runners
        feeding = beside(feed, stages.loops, 3)
        forward.wait()  # 1. the device is inside iteration 0
        # 2. iteration 1 gets prepared meanwhile; iteration 2 does not: its buffers are being read
        until(lambda: "free input buffers for iteration 2" in loop.doing())
        assert prepared == [0, 1]
        assert runner.cache == {}
        forward.let()  # 3. iteration 0 ends, 1 starts, 2 may be prepared
        forward.wait()
        until(lambda: prepared == [0, 1, 2])
        assert len(runner.cache) == 1
        forward.let(2)
        feeding.result(HAND_OVER)
    assert stages.failed == []


def test_the_device_never_reads_what_is_being_written(monkeypatch, beside):
    prepare = Gate(monkeypatch, *WHERE["prepare"])
    with Stages(1) as stages:
        [loop], [runner] = stages.loops, stages.runners
        feeding = beside(feed, stages.loops, 1)
        prepare.wait()
        # Half of set 0 is written; the device must not have started.
        until(lambda: "(device thread) waits for inputs" in loop.doing())
        assert runner.cache == {}
        prepare.let()
        feeding.result(HAND_OVER)
        loop.call(lambda: None)
        assert len(runner.cache) == 1
    assert stages.failed == []


def test_a_set_that_is_written_while_it_is_read_is_found(forward, monkeypatch):
    start = Turns.start_write
    monkeypatch.setattr(Turns, "start_write", lambda turns: start(turns) * 0)
    with Stages(1) as stages:
        output, again = one_by_one(2)
        stages.run(0, output, 0)
        forward.wait()
        with pytest.raises(TokenSafetyError, match="set 0, which holds iteration 0, being read"):
            stages.run(1, again, 0)
        forward.let(2)


def test_unwatched_the_model_reads_what_is_not_its_iterations(forward, monkeypatch):
    start = Turns.start_write
    monkeypatch.setattr(Turns, "start_write", lambda turns: start(turns) * 0)
    with Stages(1, stage=sampled_stage.SampledStage) as stages:
        output, again = one_by_one(2)
        stages.run(0, output, 0)
        forward.wait()
        stages.run(1, again, 0)
        forward.let(2)
        until(lambda: stages.failed)
    assert isinstance(stages.failed[0], KeyError), "of a token that is not in its cache"


# ---- stalls -------------------------------------------------------------------------------------


def test_a_stall_report_says_what_each_thread_waits_for(forward):
    with Stages(2) as stages:
        feed(stages.loops, 1)
        forward.wait()
        until(lambda: "hidden states of iteration 0" in stages.loops[1].doing())
        idle = "(preparing thread) waits for a scheduling output, (device thread) {}, (publisher) "
        idle += "waits for the next iteration"
        assert stages.loops[0].doing() == idle.format("runs iteration 0")
        assert stages.loops[1].doing() == idle.format("waits for hidden states of iteration 0")
        forward.let(2)
        for loop in stages.loops:
            loop.call(lambda: None)
        assert stages.loops[1].doing() == idle.format("waits for inputs")


def test_a_wait_for_buffers_that_nobody_ends_has_a_bound(forward):
    with Stages(1, stall_timeout=0.01) as stages:
        with pytest.raises(
            StallError, match=r"waits for free input buffers for iteration 2.*runs itera"
        ) as caught:
            feed(stages.loops, 3)
        forward.let()
        until(lambda: stages.failed)
    assert stages.failed == [caught.value]


def test_a_stalled_drain_names_what_both_threads_do_and_ends_nothing(forward):
    with Stages(1, stall_timeout=0.01) as stages:
        [loop] = stages.loops
        buffer = loop.double_buffer
        forward.let()
        feed(stages.loops, 2)
        for _ in range(2):
            forward.wait()
        with pytest.raises(
            StallError,
            match=r"\(preparing thread\) waits for a scheduling output, \(device thread\) runs "
            r"iteration 1 \(1 iterations prepared and not finished\)",
        ):
            buffer.drain()
        forward.let()
        until(lambda: "(device thread) waits for inputs" in loop.doing())
        buffer.drain()
    assert stages.failed == []


# ---- errors and the end -------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_an_error_ends_both_threads_as_itself(where, monkeypatch):
    """That of the third iteration; nothing runs behind it."""
    owner, name = WHERE[where]
    error, left, real = RuntimeError(f"{where} broke"), [2], getattr(owner, name)

    def breaks(*args, **kwargs):
        if not left[0]:
            raise error
        left[0] -= 1
        return real(*args, **kwargs)

    with Stages(2) as stages:
        monkeypatch.setattr(owner, name, breaks)
        receives = where == "receive"
        loop, runner = stages.loops[receives], stages.runners[receives]
        # The stage before may say first that its peer is gone.
        with pytest.raises((RuntimeError, PeerDiedError)) as caught:
            feed(stages.loops if receives else [loop], 30)
        assert caught.value is error or receives
        until(lambda: any(said is error for said in stages.failed))
        with pytest.raises(RuntimeError) as caught:
            loop.double_buffer.prepare(Header(Kind.SCHEDULE, 0, 99), None)
        assert caught.value is error
        # Preparing 2 has waited for 0; 1 may not have had its turn.
        assert len(runner.cache) in {"prepare": (1, 2), "send": (3,)}.get(where, (2,))


@pytest.fixture
def receiving():
    """Two stages, of which the last waits for the hidden states of iteration 0, and its loop."""
    with Stages(2) as stages:
        loop = stages.loops[1]
        feed([loop], 1)
        until(lambda: "waits for hidden states of iteration 0" in loop.doing())
        yield stages, loop


def test_the_first_of_two_errors_is_the_one_that_is_told(receiving):
    """1. the device waits for hidden states; 2. preparing fails, which interrupts the wait; 3. the
    interrupted wait fails as well."""
    stages, loop = receiving
    _, decodes = one_by_one(2)
    decodes.scheduled_cached_reqs.req_ids[0] = "unknown"
    with pytest.raises(KeyError, match="unknown") as caught:
        loop.double_buffer.prepare(Header(Kind.SCHEDULE, 1, 1), decodes)
    until(lambda: stages.failed)
    assert stages.failed == [caught.value]


def test_an_error_from_outside_ends_both_threads_and_a_call(receiving, beside):
    stages, loop = receiving
    called = beside(loop.call, lambda: pytest.fail("an iteration is in the worker"))
    until(lambda: "waits for the end of a call" in loop.doing())
    error = OSError("the channel broke")
    loop.double_buffer.fail(error)
    assert called.exception(HAND_OVER) is error
    with pytest.raises(OSError, match="the channel broke"):
        loop.double_buffer.drain()
    until(lambda: stages.failed)
    assert stages.failed == [error]


@pytest.mark.parametrize("where", WHERE)
def test_shutdown_in_the_middle_of_a_step_ends_both_threads(where, monkeypatch, beside):
    with Stages(2) as stages:
        gate = Gate(monkeypatch, *WHERE[where])
        loop, thread = (each[where == "receive"] for each in (stages.loops, stages.threads))
        feeding = beside(feed, [loop], 3)
        gate.wait()
        loop.double_buffer.close()
        gate.let(3)
        assert isinstance(feeding.exception(HAND_OVER), StageStoppedError)
        thread.join(HAND_OVER)
        assert not thread.is_alive()
        with pytest.raises(StageStoppedError):
            loop.double_buffer.prepare(Header(Kind.SCHEDULE, 0, 9), None)
        with pytest.raises(StageStoppedError):
            loop.double_buffer.drain()
    assert stages.failed == [], "the device thread returns"


def test_what_was_prepared_before_the_end_is_not_run():
    with Stages(1, threads=False) as stages:
        feed(stages.loops, 1)
        stages.loops[0].double_buffer.close()
        stages.loops[0].double_buffer.run()
        assert stages.runners[0].cache == {}


def test_a_signal_in_the_device_thread_ends_the_process_also_after_the_end(monkeypatch):
    """1. the threads are told to end; 2. SIGTERM arrives inside a step."""

    def signalled(*_):
        raise SystemExit(0)

    monkeypatch.setattr(Runner, "forward", signalled)
    forward = Gate(monkeypatch, Runner, "forward")
    with Stages(1) as stages:
        feed(stages.loops, 1)
        forward.wait()
        stages.loops[0].double_buffer.close()
        forward.let()
    assert [type(error) for error in stages.failed] == [SystemExit]


# ---- control calls -----------------------------------------------------------------------------


def test_a_call_runs_in_the_device_thread_behind_what_came_before_and_beside_nothing(
    forward, beside
):
    with Stages(1) as stages:
        runner, loop, seen = stages.runners[0], stages.loops[0], []

        def call():
            seen.append((threading.current_thread().name, len(runner.cache), loop.doing()))

        def fed():
            feed(stages.loops, 2)
            loop.call(call)
            seen.append("behind")

        feeding = beside(fed)
        forward.wait()
        until(lambda: "waits for the end of a call" in loop.doing())
        assert seen == []
        forward.let(2)
        feeding.result(HAND_OVER)
    idle = "(preparing thread) waits for the end of a call, (device thread) runs a call, "
    assert seen == [("device 0", 2, idle + "(publisher) waits for the next iteration"), "behind"]


def test_a_call_that_raises_is_the_callers_and_the_stage_goes_on():
    def broken():
        raise LookupError("no such adapter")

    with Stages(2) as stages:
        for loop in stages.loops:
            with pytest.raises(LookupError, match="no such adapter"):
                loop.call(broken)
        for prompt, tokens in serve(stages, iterations=60).values():
            assert tokens == continuation(prompt, len(tokens))
    assert stages.failed == []


def test_a_signal_in_a_call_ends_the_process():
    def signalled():
        raise SystemExit(0)

    with Stages(1) as stages:
        with pytest.raises(SystemExit):
            stages.loops[0].call(signalled)
        until(lambda: stages.failed)
    assert [type(error) for error in stages.failed] == [SystemExit]
