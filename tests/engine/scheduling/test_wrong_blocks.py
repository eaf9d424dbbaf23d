"""Blocks of the KV cache that hold what they should not, whoever else has their tokens in his prompt."""

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.engine.scheduling.test_scheduler import BLOCK, configs, model  # noqa: F401
from tests.engine.scheduling.whole_engine import WholeEngine, continued
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from sipipe.engine.scheduling.scheduler import PipelineScheduler

LOADED = 2
"""Blocks that the connector has of the first request."""
BLOCKS = 40


class Lender(KVConnectorBase_V1, SupportsHMA):
    """A connector that has the first blocks of request ``a``, and of no other."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (LOADED * BLOCK if request.request_id == "a" else 0), False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def request_finished_all_groups(self, request, block_ids):
        return False, None


def with_nan(sampled):
    """An answer of samplers in whose place no row of one request had a distribution."""
    errors = [(0, "the model's logits hold NaN")]
    return msgspec.structs.replace(sampled, rows=b"", tokens=b"", errors=errors)


class FailingLoad(WholeEngine):
    """An engine in which the blocks that request ``a`` loads do not come.

    What lies in them, and in all that was computed with it, is spoilt when that is said; until then
    logits hold NaN. ``leaves``: requests whose clients leave just before.
    """

    def __init__(self, config, leaves, *, windows: bool) -> None:
        super().__init__(PipelineScheduler, config, blocks=BLOCKS, windows=windows)
        self._leaves = leaves
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._fail_load
        self._run = self._stage.run
        self._stage.run = self._run_with_nan
        self.failed = False

    def _run_with_nan(self, iteration):
        sampled = self._run(iteration)
        return sampled if self.failed else with_nan(sampled)

    def _fail_load(self, batch, result):
        loading = any(new.req_id == "a" for new in batch.scheduled_new_reqs)
        if loading and not self.failed:
            self.failed = True
            manager = self.scheduler.kv_cache_manager
            # Of layers with a window where there are some: nothing of the others was loaded wrongly.
            invalid = manager.get_block_ids("a")[-1][:LOADED]
            for id in "ab":
                for block in manager.get_block_ids(id)[0]:
                    self._stage.cache[block * BLOCK : (block + 1) * BLOCK] = 7
            self.abort(self._leaves)
            result.kv_connector_output = KVConnectorOutput(invalid_block_ids=set(invalid))
        return self._update(batch, result)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("leaves", [[], ["a"], ["b"], ["a", "b"]], ids="-".join)
def test_nobody_has_what_was_computed_with_blocks_that_did_not_come(
    configs,  # noqa: F811
    policy,
    leaves,
    windows,
):
    """Request ``b`` hits the blocks while they are loaded, and caches one of its own behind them."""
    transfer = KVTransferConfig(
        kv_connector="Lender",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
    )
    engine = FailingLoad(configs(2, kv_transfer_config=transfer), leaves, windows=windows)
    prompts = {"a": 40, "b": 60}
    for id, prompt in prompts.items():
        engine.add(id, prompt, 4, seed="alike")
        engine.step()
    assert engine.batches == [{id: prompts[id] - LOADED * BLOCK} for id in "ab"]
    assert engine.failed
    engine.run()
    for id in "cd":
        text = engine.add(id, 60, 4, seed="alike").prompt_token_ids
        engine.run()
        assert engine.tokens[id] == continued(text, 4)
    for id, prompt in prompts.items():
        served = policy == "recompute" and id not in leaves
        assert engine.tokens[id] == (continued(text[:prompt], 4) if served else [])


def test_a_prompt_whose_request_had_nan_is_computed_anew(configs):  # noqa: F811
    """The NaN may have come from a block that had another's before, and is not there any more."""
    engine = WholeEngine(PipelineScheduler, configs(2), blocks=BLOCKS)
    stage = engine._stage  # noqa: SLF001
    run = stage.run

    def run_with_nan(iteration):
        sampled = run(iteration)
        if "a" not in iteration.work.sampled:
            return sampled
        for block in engine.scheduler.kv_cache_manager.get_block_ids("a")[0]:
            stage.cache[block * BLOCK : (block + 1) * BLOCK] = 7
        return with_nan(sampled)

    stage.run = run_with_nan
    engine.add("a", 60, 4, seed="alike")
    engine.run()
    assert "NaN" in engine.errors["a"]
    text = engine.add("b", 60, 4, seed="alike").prompt_token_ids
    engine.run()
    assert engine.tokens["b"] == continued(text, 4)
