"""The scheduler's side of a connector that answers, or raises, anything."""

import inspect
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from vllm.v1.core.sched import scheduler

from sipipe.engine.iteration.kv_loads import OTHERWISE, KVLoads
from sipipe.engine.iteration.wrong_blocks import WrongBlocksScheduler

BLOCK = 32


class Anything:
    """A connector: ``answer`` is a number of tokens, or what it raises."""

    def __init__(self, answer, waits):
        self.answer = answer
        self.waits = waits
        self.raises = None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, self.waits

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if self.raises:
            raise self.raises

    def build_connector_meta(self, scheduler_output):
        if self.raises:
            raise self.raises
        return "metadata"


def allocated(count):
    return SimpleNamespace(get_block_ids=lambda: (list(range(100, 100 + count)),))


answers = st.integers(-100, 400) | st.none() | st.just(KeyError("x"))


@given(answer=answers, waits=st.booleans(), tokens=st.integers(1, 300), local=st.integers(0, 9))
def test_no_more_tokens_are_matched_than_a_prompt_has(answer, waits, tokens, local):
    """And no fewer than none; all blocks of those that are, and no other, are told to the workers."""
    local = min(local, (tokens - 1) // BLOCK) * BLOCK
    connector = Anything(answer, waits)
    loads = KVLoads(connector, block_sizes=[BLOCK])
    request = SimpleNamespace(request_id="a", num_tokens=tokens)
    count, later = connector.get_num_new_matched_tokens(request, local)
    assert count is None or 0 <= count <= tokens - local - (not later)
    possible = isinstance(answer, int) and 0 <= answer <= tokens - local - (not waits)
    assert count == (answer if possible or answer is None else 0)
    blocks = -(-tokens // BLOCK)
    connector.update_state_after_alloc(request, allocated(blocks), count or 0)
    told = loads.take()
    assert bool(told) == bool(count)
    assert not loads.take()
    for load in told:
        assert (load.request_id, load.waits, load.reason) == ("a", waits, "")
        last = -(-(local + count) // BLOCK)
        assert load.block_ids == tuple(range(100 + local // BLOCK, 100 + last))
        loads.fail({load.block_ids[-1]}, set())
        assert connector.get_num_new_matched_tokens(request, local) == (0, False)
        loads.forget("a")
        assert connector.get_num_new_matched_tokens(request, local) == (count, later)


@pytest.mark.parametrize("method", ["update_state_after_alloc", "build_connector_meta"])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_that_no_worker_is_asked_for_are_told_as_such(method, groups):
    connector = Anything(64, True)
    loads = KVLoads(connector, block_sizes=[BLOCK] * groups)
    request = SimpleNamespace(request_id="a", num_tokens=65)
    connector.get_num_new_matched_tokens(request, 0)
    connector.raises = OSError("gone") if method == "update_state_after_alloc" else None
    connector.update_state_after_alloc(request, allocated(3), 64)
    connector.raises = OSError("gone") if method == "build_connector_meta" else None
    assert (connector.build_connector_meta(None) == "metadata") == (connector.raises is None)
    (load,) = loads.take()
    assert load.reason == "OSError: gone"
    assert load.block_ids == ((100, 101) if groups == 1 else ())


def test_of_several_groups_all_blocks_behind_the_cached_ones_are_told():
    """A window has a part of them alone, recurrent layers one for all tokens; 0 is no block."""
    connector = Anything(2 * BLOCK, False)
    loads = KVLoads(connector, block_sizes=[BLOCK, BLOCK, 1000])
    request = SimpleNamespace(request_id="a", num_tokens=4 * BLOCK + 1)
    connector.get_num_new_matched_tokens(request, BLOCK)
    held = ([10, 11, 12, 13], [0, 0, 22, 23], [30])
    connector.update_state_after_alloc(
        request, SimpleNamespace(get_block_ids=lambda: held), 2 * BLOCK
    )
    (load,) = loads.take()
    assert load.block_ids == (11, 12, 13, 22, 23, 30)
    assert loads.fail({10, 21}, set()) == set()
    assert loads.fail({22}, set()) == {"a"}, "also when it has given the block back"
    assert connector.get_num_new_matched_tokens(request, BLOCK) == (0, False)


@pytest.mark.parametrize(("name", "otherwise"), OTHERWISE.items())
def test_what_is_beside_a_load_may_raise(name, otherwise):
    connector = Anything(0, False)

    def raising(*_, **__):
        raise OSError("gone")

    setattr(connector, name, raising)
    KVLoads(connector, block_sizes=[BLOCK])
    assert getattr(connector, name)("any", arguments=1) == otherwise


def test_events_that_raise_when_they_are_made_are_none():
    connector = Anything(0, False)

    def events():
        yield "stored"
        raise OSError("gone")

    connector.take_events = events
    KVLoads(connector, block_sizes=[BLOCK])
    assert connector.take_events() == ()
    connector.take_events = lambda: iter(["stored"])
    KVLoads(connector, block_sizes=[BLOCK])
    assert connector.take_events() == ("stored",)


def test_all_methods_that_vllms_scheduler_calls_are_guarded():
    called = set(re.findall(r"self\.connector\.(\w+)\(", inspect.getsource(scheduler)))
    called -= {"bind_kv_cache_manager", "shutdown"}  # at a start, and at an end
    loads = {"get_num_new_matched_tokens", "update_state_after_alloc"}
    assert called - loads == set(OTHERWISE)


def test_a_load_that_fails_behind_its_request_is_not_remembered():
    """A client that leaves while its blocks are on their way: whoever leaves is forgotten once."""

    class Behind:
        def _handle_failed_recving(self, failed):
            return failed

    class Scheduler(WrongBlocksScheduler, Behind):
        def __init__(self):
            ended = SimpleNamespace(is_finished=lambda: True)
            waits = SimpleNamespace(is_finished=lambda: False)
            self.requests = {"ended": ended, "waits": waits}
            self.told = set()
            self._kv_loads = SimpleNamespace(fail=lambda _, requests: self.told.update(requests))

    scheduler = Scheduler()
    failed = {"gone", "ended", "waits"}
    assert scheduler._handle_failed_recving(failed) == failed  # noqa: SLF001
    assert scheduler.told == {"waits"}
