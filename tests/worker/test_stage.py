"""A stage of SiPipe's path, whole: both threads, preparation, links, draws, publisher, calls."""

import random
import threading

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.arithmetic import Runner, continuation
from tests.worker.arithmetic_stages import HAND_OVER, INFLIGHT, OwnInputs, Requests, Stages
from tests.worker.token_safety import TokenSafetyError
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from sipipe.worker import sampled_stage
from sipipe.worker.double_buffer import Turns
from sipipe.worker.preparation import SiPipePrepares


class Gate:
    """Stops each call of a function where it begins."""

    def __init__(self, monkeypatch, owner, name):
        self.reached, self._let = threading.Semaphore(0), threading.Semaphore(0)
        real = getattr(owner, name)

        def gated(*args):
            self.reached.release()
            assert self._let.acquire(timeout=HAND_OVER)
            return real(*args)

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
        (1, OwnInputs, 2),
        (2, OwnInputs, 2),
    ],
)
def test_tokens_follow_from_their_prompts(count, state, sets, monkeypatch):
    """Whoever prepares, ahead or in turn."""
    monkeypatch.setattr(sampled_stage, "SETS", sets)
    with Stages(count, state=state) as stages:
        preparing = [isinstance(loop.stage._preparation, SiPipePrepares) for loop in stages.loops]
        assert preparing == [state is DefaultModelState] * count
        for prompt, tokens in serve(stages).values():
            assert tokens == continuation(prompt, len(tokens))
    assert stages.failed == []


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


def one_by_one(iterations):
    """Outputs of so many iterations of one request that is in its prompt, a token each."""
    requests = Requests()
    requests.add("a", range(3, 40))
    return [requests.schedule({"a": 1})[0] for _ in range(iterations)]


def decoding(stages, iterations):
    """Hand them over."""
    for iteration, output in enumerate(one_by_one(iterations)):
        stages.run(iteration, output, 0)


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


def test_a_stall_report_says_what_each_thread_waits_for(monkeypatch):
    send = Gate(monkeypatch, Runner, "forward")
    with Stages(2) as stages:
        feeding = threading.Thread(target=decoding, args=(stages, 1))
        feeding.start()
        send.wait()
        until(lambda: "hidden states of iteration 0" in stages.loops[1].doing())
        idle = "(preparing thread) waits for a scheduling output, (device thread) {}, (publisher) "
        idle += "waits for the next iteration"
        assert stages.loops[0].doing() == idle.format("runs iteration 0")
        assert stages.loops[1].doing() == idle.format("waits for hidden states of iteration 0")
        send.let(2)
        feeding.join(HAND_OVER)
        for loop in stages.loops:
            loop.call(lambda: None)
        assert stages.loops[1].doing() == idle.format("waits for inputs")


# ---- control calls -----------------------------------------------------------------------------


def test_a_call_runs_in_the_device_thread_behind_what_came_before_and_beside_nothing(forward):
    with Stages(1) as stages:
        runner, loop, seen = stages.runners[0], stages.loops[0], []

        def call():
            seen.append((threading.current_thread().name, len(runner.cache), loop.doing()))

        def feed():
            decoding(stages, 2)
            loop.call(call)
            seen.append("behind")

        feeding = threading.Thread(target=feed)
        feeding.start()
        forward.wait()
        until(lambda: "waits for the end of a call" in loop.doing())
        assert seen == []
        forward.let(2)
        feeding.join(HAND_OVER)
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
