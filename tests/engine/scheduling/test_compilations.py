"""Grammars are compiled within a bound, several at a time, and given up; no engine is started."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sipipe.engine.scheduling.compilations import LEAST, Compilations, check_grammar, compile_beside

SECONDS = 5.0
TEST_SECONDS = 30


class Request:
    def __init__(self):
        self.ended = False
        self.thread = None
        """The thread that compiles its grammar, once it does."""
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.left = threading.Event()
        self.outcome = "grammar"

    def is_finished(self):
        return self.ended


def create(request):
    """Compiles a grammar when the test says so."""
    request.thread = threading.current_thread()
    request.begun.set()
    assert request.go_on.wait(TEST_SECONDS)
    request.left.set()
    if isinstance(request.outcome, Exception):
        raise request.outcome
    return request.outcome


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def compilations(most=LEAST):
    clock = Clock()
    return Compilations(SECONDS, check=lambda _: None, most=most, now=clock), clock


def finish(*requests):
    for request in requests:
        request.go_on.set()


def test_one_that_takes_long_holds_up_no_other():
    compiling, _ = compilations()
    slow, quick = Request(), Request()
    late, soon = compiling.submit(create, slow), compiling.submit(create, quick)
    finish(quick)
    assert soon.result(TEST_SECONDS) == "grammar"
    assert not late.done()
    finish(slow)
    assert late.result(TEST_SECONDS) == "grammar"


def test_one_that_is_late_fails_and_makes_room():
    compiling, clock = compilations(most=1)
    slow, next_one = Request(), Request()
    late = compiling.submit(create, slow)
    assert slow.begun.wait(TEST_SECONDS)
    clock.seconds = SECONDS
    soon = compiling.submit(create, next_one)
    assert not next_one.begun.is_set()
    clock.seconds = SECONDS + 1
    compiling.sweep()
    with pytest.raises(ValueError, match=r'did not compile within 5 s; .*"grammar_timeout"'):
        late.result(0)
    finish(next_one)
    assert soon.result(TEST_SECONDS) == "grammar"
    finish(slow)


def test_one_that_waits_too_long_says_what_for():
    compiling, clock = compilations(most=1)
    first, slow, other = Request(), Request(), Request()
    compiling.submit(create, first)
    clock.seconds = 1.0
    runs, waits = compiling.submit(create, slow), compiling.submit(create, other)
    clock.seconds = 4.0
    finish(first)
    assert slow.begun.wait(TEST_SECONDS)
    clock.seconds = SECONDS + 2
    compiling.sweep()
    with pytest.raises(ValueError, match="waited for 5 s while those of other requests"):
        waits.result(0)
    assert not runs.done(), "it has run for 3 s"
    finish(slow)


def test_one_that_gets_no_thread_fails_alone(monkeypatch):
    """The engine's own thread starts those that waited: it must not end by it."""
    compiling, _ = compilations(most=1)
    first, second, third = Request(), Request(), Request()
    compiling.submit(create, first)
    waits = compiling.submit(create, second)
    start = threading.Thread.start

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first.ended = True
    compiling.sweep()
    with pytest.raises(ValueError, match="can't start new thread"):
        waits.result(0)
    monkeypatch.setattr(threading.Thread, "start", start)
    finish(third)
    assert compiling.submit(create, third).result(TEST_SECONDS) == "grammar"
    finish(first)


def test_one_whose_client_has_left_is_in_nobodys_way():
    compiling, _ = compilations(most=1)
    left, other = Request(), Request()
    compiling.submit(create, left)
    soon = compiling.submit(create, other)
    assert left.begun.wait(TEST_SECONDS)
    left.ended = True
    compiling.sweep()
    finish(other)
    assert soon.result(TEST_SECONDS) == "grammar"
    finish(left)


def test_those_that_go_on_for_nobody_are_bounded():
    compiling, _ = compilations(most=1)
    abandoned = [Request() for _ in range(4)]
    for request in abandoned:
        compiling.submit(create, request)
        request.ended = True
        compiling.sweep()
    assert sum(request.begun.wait(0.2) for request in abandoned) <= 2
    finish(*abandoned)


def test_the_end_waits_for_none():
    compiling, _ = compilations(most=1)
    running, waiting = Request(), Request()
    futures = [compiling.submit(create, request) for request in (running, waiting)]
    assert running.begun.wait(TEST_SECONDS)
    compiling.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        with pytest.raises(ValueError, match="the engine ends"):
            future.result(0)
    with pytest.raises(RuntimeError, match="the engine ends"):
        compiling.submit(create, Request())
    assert running.thread.daemon
    finish(running)
    running.thread.join(TEST_SECONDS)


def test_what_a_backend_says_is_one_line():
    compiling, _ = compilations()
    request = Request()
    request.outcome = RuntimeError("[04:05:06] grammar.cc:7:\n  EBNF parser error")
    finish(request)
    with pytest.raises(ValueError, match=r"^\[04:05:06\] grammar.cc:7: EBNF parser error$"):
        compiling.submit(create, request).result(TEST_SECONDS)


def test_a_grammar_without_a_first_token_is_refused():
    def manager(*words):
        backend = SimpleNamespace(
            allocate_token_bitmask=lambda _: torch.full((1, len(words)), -1, dtype=torch.int32)
        )

        def fill(bitmask, index):
            bitmask[index] = torch.tensor(words, dtype=torch.int32)

        return SimpleNamespace(backend=backend), SimpleNamespace(
            fill_bitmask=fill, is_terminated=lambda: False
        )

    check_grammar(*manager(0, 8))
    with pytest.raises(ValueError, match="allows no token at all"):
        check_grammar(*manager(0, 0))


def test_a_manager_without_a_tokenizer_has_none():
    assert compile_beside(SimpleNamespace(), SimpleNamespace(additional_config=None)) is None


class Compiling(RuleBasedStateMachine):
    """Requests that come, end, compile, fail and are late in any order."""

    def __init__(self):
        super().__init__()
        self.compilations, self.clock = compilations()
        self.requests, self.futures = [], []

    @rule()
    def come(self):
        request = Request()
        self.requests.append(request)
        self.futures.append(self.compilations.submit(create, request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        data.draw(st.sampled_from(self.requests)).ended = True
        self.compilations.sweep()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), fails=st.booleans())
    def compile(self, data, fails):
        """Its thread goes on, or will not wait when it begins: the threads run as they like."""
        request = data.draw(st.sampled_from(self.requests))
        if fails and not request.go_on.is_set():
            request.outcome = ValueError("no grammar")
        request.go_on.set()

    @rule(seconds=st.sampled_from([1.0, SECONDS + 1]))
    def wait(self, seconds):
        self.clock.seconds += seconds
        self.compilations.sweep()

    @invariant()
    def the_bounds_hold(self):
        compiled = [
            (request, future)
            for request, future in zip(self.requests, self.futures, strict=True)
            if request.begun.is_set() and not request.left.is_set()
        ]
        assert sum(not future.done() for _, future in compiled) <= LEAST
        assert len(compiled) <= 2 * LEAST

    def teardown(self):
        finish(*self.requests)
        for _ in range(2):  # what waits by now, and what began to wait for it
            self.clock.seconds += SECONDS + 1
            self.compilations.sweep()
        for future in self.futures:
            assert future.exception(TEST_SECONDS) is None or future.exception(0)
        for thread in threading.enumerate():
            if thread.name == "SiPipeGrammar":
                thread.join(TEST_SECONDS)


TestCompiling = Compiling.TestCase
TestCompiling.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
