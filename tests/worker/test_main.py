"""The process of a worker without vLLM's worker: following BIC-I, control calls, replies."""

import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.ipc.errors import ChannelClosed, ChannelPeerDied
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.messages.boots import Watched
from sipipe.messages.calls import OpenChannels
from sipipe.messages.header import Kind, encode_header
from sipipe.messages.places import StagePlace
from sipipe.messages.replies import Reply
from sipipe.worker import main as worker_main
from sipipe.worker.double_buffer import DoubleBuffer

from .fake_device import HAND_OVER, FakeStage


def iteration(number, output=None):
    return [encode_header(Kind.SCHEDULE, 0, number), b"", pickle.dumps(output)]


def grammar(number):
    return [encode_header(Kind.GRAMMAR, 0, number), b"a bitmask"]


def call(number, method, *args, only=None):
    body = pickle.dumps((method, args, {}, only))
    return [encode_header(Kind.CONTROL, 0, number), b"", body]


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


class Loop:
    """A stage's loop over a fake device."""

    def __init__(self, stage, *, opened=True):
        self.stage, self.double_buffer = stage, None
        if opened:
            self.open()

    def open(self):
        self.double_buffer = DoubleBuffer(
            self.stage, sets=2, stall_timeout=HAND_OVER, interrupt=self.stage.release_all
        )
        return "open"

    def answer(self, request):
        assert isinstance(request, OpenChannels)
        return self.open()

    def run(self, iteration, slot, output, logits_row, logits_rows):
        self.double_buffer.prepare(iteration, slot, output)

    def call(self, function):
        return function() if self.double_buffer is None else self.double_buffer.call(function)

    def doing(self):
        return self.double_buffer.doing() if self.double_buffer is not None else ""

    def close(self):
        if self.double_buffer is not None:
            self.double_buffer.close()


class Worker:
    """What control calls find, in place of vLLM's wrapper."""

    def __init__(self, stage, main):
        self.stage, self.main = stage, main

    def doing(self):
        return self.main._doing()

    def seen(self):
        return list(self.stage.sent)

    def here(self):
        return threading.current_thread().name

    def lock(self):
        return threading.Lock()

    def mourn(self):
        raise PeerDiedError("the previous stage died")

    def broken(self):
        raise ValueError("no such adapter")


@pytest.fixture
def process(monkeypatch):
    """Runs a worker over messages; returns what it said to the engine."""

    def run(messages, *, stage=None, opened=True, end=None):
        stage = stage or FakeStage()
        boot = SimpleNamespace(
            place=StagePlace(stage=0, stages=2, tp_rank=0, tp_size=1),
            layers=(2, 2),
            watched=Watched(stages=2, inflight=2, run="test", model="none"),
            local_rank=0,
            distributed_init_method="file:///nowhere",
        )
        parent = Parent()
        main = run.main = worker_main.Main(boot, parent, [])
        main._call, main._wrapper = "", Worker(stage, main)
        reader = run.reader = Reader(messages, end or ChannelClosed("closed"))
        monkeypatch.setattr(worker_main, "DispatchReader", lambda *_: reader)
        main._loop = Loop(stage, opened=opened)
        try:
            main.serve(main._loop)
        finally:
            main._wrapper = None  # nothing of vLLM's to shut down
            main.close()
            if main._preparing is not None:
                main._preparing.join(HAND_OVER)
        return parent.said

    return run


def test_calls_run_between_iterations_and_are_answered(process):
    stage = FakeStage()
    messages = [iteration(0), grammar(0), iteration(1), call(7, "seen"), iteration(2)]
    messages.append(call(8, "seen"))
    assert process(messages, stage=stage) == [answer(7, [0, 1]), answer(8, [0, 1, 2])]
    assert process.reader.closed
    assert stage.threads["prepare"] == "SiPipePreparing"
    assert stage.threads["forward"] == threading.current_thread().name


def test_calls_run_in_the_device_thread(process):
    me = threading.current_thread().name
    asked = [call(1, "here"), call(2, OpenChannels(links=[])), iteration(0), call(3, "here")]
    found = process(asked, opened=False)
    assert found == [answer(1, me), answer(2, "open"), answer(3, me)]
    assert process.main._preparing.name == "SiPipePreparing"


@pytest.mark.parametrize(
    ("method", "error"),
    [("broken", "no such adapter"), ("absent", "'Worker' object has no attribute 'absent'")],
)
def test_a_call_that_fails_is_an_answer_and_not_the_end(process, method, error):
    assert process([call(1, method), iteration(0), call(2, "seen")]) == [
        Reply(call=1, error=error),
        answer(2, [0]),
    ]


def test_a_neighbours_death_in_a_call_is_the_end(process):
    with pytest.raises(PeerDiedError):
        process([call(1, "mourn"), call(2, "seen")])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ([encode_header(Kind.CONTROL, 0, 1), b"", b"no pickle"], "load key"),
        (call(1, "lock"), "pickle"),
    ],
    ids=["it cannot be read", "its result cannot be sent"],
)
def test_what_cannot_be_pickled_is_an_answer_and_not_the_end(process, asked, error):
    failed, read = process([asked, call(2, "seen")])
    assert failed.call == 1
    assert error in failed.error
    assert read == answer(2, [])


def test_only_the_rank_that_is_asked_answers(process):
    asked = [call(1, "seen", only=1), call(2, "lock", only=1), call(3, "seen", only=0)]
    assert process(asked) == [answer(3, [])]


def test_without_a_data_plane_the_end_of_the_channel_is_raised(process):
    with pytest.raises(ChannelClosed):
        process([call(1, "seen")], opened=False)


@pytest.mark.parametrize("where", ["prepare", "receive", "forward", "send"])
def test_an_error_in_an_iteration_comes_out_as_itself(process, where):
    error = RuntimeError(f"{where} broke")
    with pytest.raises(RuntimeError) as caught:
        process([iteration(0), call(1, "seen")], stage=FakeStage(fail={(where, 0): error}))
    assert caught.value is error


def test_a_dead_engine_is_an_error(process):
    with pytest.raises(ChannelPeerDied):
        process([call(1, "seen")], end=ChannelPeerDied("the engine died"))


def test_the_stall_report_says_what_a_call_and_both_threads_do(process):
    threads = "(preparing thread) {}, (device thread) {}"
    _, told = process([iteration(0), call(1, "seen"), call(2, "doing")])
    inside = threads.format("waits for the end of a call", "runs a call")
    assert told == answer(2, f"runs doing; {inside}")
    idle = threads.format("waits for a scheduling output", "waits for inputs")
    assert process.main._doing() == idle


def test_a_failure_that_cannot_be_pickled_is_said_as_text():
    class LocalError(Exception):
        pass

    parent = Parent()
    worker_main._say_failure(parent, LocalError("device lost"))
    (said,) = parent.said
    assert isinstance(said, RuntimeError)
    assert "device lost" in str(said)
