"""The process of a worker without vLLM's worker: following BIC-I, control calls, replies."""

import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.worker.arithmetic import Runner
from tests.worker.arithmetic_stages import HAND_OVER, Stages, boot_of, one_by_one, place_of
from vllm.distributed import parallel_state

from sipipe.errors import DamagedError
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.messages.header import Kind, encode_header
from sipipe.messages.replies import Reply
from sipipe.messages.step import int32_bytes
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker import main as worker_main
from sipipe.worker.hooks.preparation import SiPipePrepares


def iteration(number, output=None):
    """``output``: of an iteration with one more token of a prompt, if it is left out."""
    output = output or one_by_one(number + 1)[number]
    return [encode_header(Kind.SCHEDULE, 0, number), b"", pickle.dumps(output)]


def grammar(number):
    return [encode_header(Kind.GRAMMAR, 0, number), b"a bitmask"]


def call(number, method, *args, only=None):
    body = pickle.dumps((method, args, {}, only))
    return [encode_header(Kind.CONTROL, 0, number), b"", body]


def plan(number, output):
    return [encode_header(Kind.PLAN, 0, number), b"", pickle.dumps(output)]


def tokens(number, *values):
    return [encode_header(Kind.SCHEDULE, 0, number), b"", int32_bytes(values)]


class Parent:
    """The engine, as a list of what it is told."""

    def __init__(self):
        self.said = []
        self.ended = False

    def receive(self):
        return "BIC-I's endpoint"

    def say(self, message):
        pickle.dumps(message)
        self.said.append(message)

    def let_end(self):
        told, self.ended = self.ended, True
        return not told


def answer(call, value):
    return Reply(call=call, value=pickle.dumps(value))


class Reader:
    """BIC-I as a list; then what ends it."""

    def __init__(self, messages, end):
        self.messages, self.end, self.closed = list(messages), end, False

    @contextmanager
    def receive(self):
        if not self.messages:
            raise self.end
        yield SimpleNamespace(parts=self.messages.pop(0))

    def close(self):
        self.closed = True


class Worker:
    """What control calls find, in place of vLLM's wrapper."""

    def __init__(self, runner, parent):
        self.runner, self.parent = runner, parent

    def doing(self):
        return self.parent.doing()

    def prepares(self):
        """Whether a thread of its own follows BIC-I."""
        return "SiPipePreparing" in {thread.name for thread in threading.enumerate()}

    def ran(self):
        """How many iterations have."""
        return len(self.runner.cache)

    def here(self):
        return threading.current_thread().name

    def lock(self):
        return threading.Lock()

    def mourn(self):
        raise PeerDiedError("the previous stage died")

    def broken(self):
        raise ValueError("no such adapter")


class LoadedMain(worker_main.Main):
    """A worker's process that takes a stage which is loaded, in the place of vLLM's worker."""

    def __init__(self, boot, parent, stage, wrapper):
        super().__init__(boot, parent, [])
        self._stage = stage
        self._wrapper = wrapper
        self._call = ""

    def load(self):
        return self._stage

    def close(self):
        self._wrapper = None  # nothing of vLLM's to shut down
        super().close()


@pytest.fixture
def process(monkeypatch):
    """Runs a worker over messages, one of a single stage; returns what it said to the engine."""

    def run(messages, *, stages=None, end=None):
        stages = stages or Stages(1, threads=False)
        [loop], [runner] = stages.loops, stages.runners
        parent = run.parent = Parent()
        main = LoadedMain(stages.boots[0], parent, loop, Worker(runner, parent))
        reader = run.reader = Reader(messages, end or ChannelClosed("closed"))
        monkeypatch.setattr(worker_main, "DispatchReader", lambda *_: reader)
        try:
            main.serve(main.load())
        finally:
            main.close()
            for thread in threading.enumerate():
                if thread.name == "SiPipePreparing":
                    thread.join(HAND_OVER)
            stages.close()
        return parent.said

    return run


@pytest.fixture
def closed(monkeypatch):
    """A stage whose channels a call is to open."""
    stages = Stages(1, threads=False, opened=False)
    monkeypatch.setattr(parallel_state, "_PP", stages.groups[0])
    return stages


def without_tokens(number):
    output = one_by_one(number + 1)[number]
    output.scheduled_cached_reqs.new_token_ids = []
    return output


def test_a_planned_iteration_runs_when_its_tokens_are_there(process, monkeypatch):
    waits = []

    def record(_, phase, number, *__, **___):
        waits.append((phase, number))

    monkeypatch.setattr(Recorder, "record", record)
    messages = [iteration(0), plan(1, without_tokens(1)), tokens(1, 4), iteration(2)]
    assert process([*messages, call(8, "ran")]) == [answer(8, 3)]
    assert [number for phase, number in waits if phase is Phase.WAIT_SCHEDULING] == [0, 1, 1, 2]


def test_tokens_of_another_iteration_end_the_worker(process):
    wrong = tokens(1, 4, 5)
    with pytest.raises(DamagedError, match="2 tokens came for 1 of iteration 1"):
        process([iteration(0), plan(1, without_tokens(1)), wrong, call(8, "ran")])


def test_a_worker_that_waits_for_tokens_ends_with_the_engine(process):
    assert process([iteration(0), plan(1, without_tokens(1))]) == []


def test_calls_run_between_iterations_and_are_answered(process, monkeypatch):
    threads, me = [], threading.current_thread().name

    def noted(real):
        def note(*args):
            threads.append(threading.current_thread().name)
            return real(*args)

        return note

    monkeypatch.setattr(SiPipePrepares, "prepare", noted(SiPipePrepares.prepare))
    monkeypatch.setattr(Runner, "forward", noted(Runner.forward))
    messages = [iteration(0), grammar(0), iteration(1), call(7, "ran"), iteration(2)]
    assert process([*messages, call(8, "ran")]) == [answer(7, 2), answer(8, 3)]
    assert process.reader.closed
    assert sorted(threads) == sorted([me, "SiPipePreparing"] * 3)


def test_calls_run_in_the_device_thread(process, closed):
    me = threading.current_thread().name
    before = [call(1, "here"), call(2, "prepares"), call(3, closed.opening)]
    after = [iteration(0), call(4, "here"), call(5, "prepares")]
    assert process([*before, *after], stages=closed) == [
        answer(1, me),
        answer(2, False),
        answer(3, None),
        answer(4, me),
        answer(5, True),
    ]


@pytest.mark.parametrize(
    ("method", "error"),
    [("broken", "no such adapter"), ("absent", "'Worker' object has no attribute 'absent'")],
)
def test_a_call_that_fails_is_an_answer_and_not_the_end(process, method, error):
    assert process([call(1, method), iteration(0), call(2, "ran")]) == [
        Reply(call=1, error=error),
        answer(2, 1),
    ]


def test_a_neighbours_death_in_a_call_is_the_end(process):
    with pytest.raises(PeerDiedError):
        process([call(1, "mourn"), call(2, "ran")])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ([encode_header(Kind.CONTROL, 0, 1), b"", b"no pickle"], "load key"),
        (call(1, "lock"), "pickle"),
    ],
    ids=["it cannot be read", "its result cannot be sent"],
)
def test_what_cannot_be_pickled_is_an_answer_and_not_the_end(process, asked, error):
    failed, read = process([asked, call(2, "ran")])
    assert failed.call == 1
    assert error in failed.error
    assert read == answer(2, 0)


def test_only_the_rank_that_is_asked_answers(process):
    asked = [call(1, "ran", only=1), call(2, "lock", only=1), call(3, "ran", only=0)]
    assert process(asked) == [answer(3, 0)]


def test_without_a_data_plane_the_end_of_the_channel_is_raised(process, closed):
    with pytest.raises(ChannelClosed):
        process([call(1, "ran")], stages=closed)


@pytest.mark.parametrize("step", [(SiPipePrepares, "prepare"), (Runner, "forward")])
def test_an_error_in_an_iteration_comes_out_as_itself(process, step, monkeypatch):
    """Of either thread."""
    error = RuntimeError("it broke")

    def breaks(*_):
        raise error

    monkeypatch.setattr(*step, breaks)
    with pytest.raises(RuntimeError) as caught:
        process([iteration(0), call(1, "ran")])
    assert caught.value is error


def test_a_dead_engine_is_an_error(process):
    with pytest.raises(PeerDiedError):
        process([call(1, "ran")], end=PeerDiedError("the engine died"))


def test_the_stall_report_says_what_a_call_and_both_threads_do(process):
    threads = "(preparing thread) {}, (device thread) {}, (publisher) waits for the next iteration"
    _, told = process([iteration(0), call(1, "ran"), call(2, "doing")])
    inside = threads.format("waits for the end of a call", "runs a call")
    assert told == answer(2, f"runs doing; {inside}")
    idle = threads.format("waits for a scheduling output", "waits for inputs")
    assert process.parent.doing() == idle


def test_a_failure_that_cannot_be_pickled_is_said_as_text(monkeypatch):
    class LocalError(Exception):
        pass

    def fails(*_):
        raise LocalError("device lost")

    monkeypatch.setattr(worker_main, "Main", fails)
    monkeypatch.setattr(worker_main, "exit_now", lambda _: None)
    monkeypatch.setattr(worker_main.tqdm, "set_lock", lambda _: None)
    parent = Parent()
    worker_main.worker_main(boot_of(place_of(0, 1)), parent, [])
    (said,) = parent.said
    assert isinstance(said, RuntimeError)
    assert "device lost" in str(said)
