"""What the KV cache manager is asked shortly it answers as vLLM's own does, in every history."""

from unittest.mock import Mock, patch

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.scheduling.test_scheduler import BLOCK, Engine, configs, model
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from sipipe.engine.scheduling import scheduler
from sipipe.engine.scheduling.blocks import answer_shortly

__all__ = ["configs", "model"]
OURS = pytest.mark.parametrize(
    "ours", [scheduler.PipelineScheduler, scheduler.AsyncPipelineScheduler]
)


def full(manager):
    """vLLM's answers alone."""


def kept(engine) -> dict:
    """Blocks of each request, how many of them are cached, and how many are free."""
    manager = engine.scheduler.kv_cache_manager
    only = manager.coordinator.single_type_managers[0]
    blocks = {name: [block.block_id for block in held] for name, held in only.req_to_blocks.items()}
    return blocks | {"cached": dict(only.num_cached_block), "free": manager.usage}


REQUESTS = st.tuples(st.integers(1, 70), st.integers(9, 50), st.integers(0, 9))
"""Tokens of the prompt, new ones, steps until the next request comes."""


@settings(max_examples=25)
@given(requests=st.lists(REQUESTS, min_size=4, max_size=24), blocks=st.integers(10, 40))
@pytest.mark.parametrize("stages", [1, 3])
@OURS
def test_answers_are_vllms_own(configs, ours, stages, requests, blocks):
    config = configs(stages)
    with patch.object(scheduler, "answer_shortly", full):
        theirs = Engine(ours, config, blocks=blocks)
    engines = theirs, Engine(ours, config, blocks=blocks)

    def both(steps: int) -> None:
        for _ in range(steps):
            first, second = (engine.step() for engine in engines)
            assert first == second
            assert kept(engines[0]) == kept(engines[1])

    for number, (prompt, new, steps) in enumerate(requests):
        # Of three two begin alike: blocks are found in the cache.
        for engine in engines:
            engine.add(f"r{number}", prompt, new, seed="alike" if number % 3 else number)
        both(steps)
    both(300)
    for engine in engines:
        engine.run()
    assert engines[0].tokens == engines[1].tokens
    assert engines[0].preempted == engines[1].preempted


@OURS
def test_most_rows_ask_nothing(configs, ours):
    engine = Engine(ours, configs(2))
    manager = engine.scheduler.kv_cache_manager
    with patch.object(manager.coordinator, "get_num_blocks_to_allocate", Mock(return_value=0)):
        asked = manager.coordinator.get_num_blocks_to_allocate
        asked.side_effect = type(manager.coordinator).get_num_blocks_to_allocate.__get__(
            manager.coordinator
        )
        engine.add_all("r", 8, 5, 10 * BLOCK)
        engine.run()
    rows = sum(map(len, engine.batches))
    assert asked.call_count < rows / 7, "two of a block's sixteen tokens"


def test_what_drafts_have_filled_is_cached(configs):
    found = []
    for answers in (full, answer_shortly):
        with patch.object(scheduler, "answer_shortly", answers):
            engine = Engine(scheduler.PipelineScheduler, configs(2))
        request = engine.add("r", 10, 40)
        manager = engine.scheduler.kv_cache_manager
        for tokens, drawn in ((10, 1), (9, 9), (1, 1)):  # the second with eight drafts
            assert manager.allocate_slots(request, tokens, num_lookahead_tokens=0) is not None
            request.num_computed_tokens += tokens
            request.append_output_token_ids([5] * drawn)
        found.append(kept(engine)["cached"])
    assert found == [{"r": 1}] * 2


@pytest.mark.parametrize("kind", [FullAttentionManager, SlidingWindowManager])
@pytest.mark.parametrize("hashed", [BLOCK, BLOCK // 2])
def test_another_kind_of_cache_is_asked_in_full(kind, hashed):
    only = Mock(block_size=BLOCK, num_cached_block={})
    only.__class__ = kind
    only.block_pool.hash_block_size = hashed
    manager = Mock()
    allocate = manager.allocate_slots
    manager.coordinator.single_type_managers = [only]
    with patch("sipipe.engine.scheduling.blocks.type", lambda one: one.__class__, create=True):
        answer_shortly(manager)
    shortly = kind is FullAttentionManager and hashed == BLOCK
    assert (manager.allocate_slots is not allocate) == shortly


def test_two_kinds_of_layers_are_asked_in_full():
    manager = Mock()
    allocate = manager.allocate_slots
    manager.coordinator.single_type_managers = [Mock(), Mock()]
    answer_shortly(manager)
    assert manager.allocate_slots is allocate
