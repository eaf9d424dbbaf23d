"""Tensor-parallel ranks that each write their columns of the logits, in SiPipe's engine.

Greedy parity with stock vLLM at tp 2 is in ``test_parity.py``; the generated models' vocabulary is
no multiple of 64, so that the ranks' shards are uneven there as here.
"""

import pytest

from tests.vllm import test_failures
from tests.vllm.engines import greedy, model, prompts, run_engine, tokens

from .test_stage_runner_parity import make_adapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_killed_sampler_finds_the_columns_of_every_rank(models, tmp_path, monkeypatch):
    monkeypatch.setitem(test_failures.TWO_STAGES, "tensor_parallel_size", 2)
    test_failures.test_a_killed_sampler_is_replaced_and_no_token_changes(models, tmp_path)


def test_where_vllm_has_to_gather_one_rank_writes_whole_rows(models, tmp_path):
    """LoRA: the head cannot be sharded by us. Tokens as with one rank."""
    adapter = make_adapter(tmp_path / "adapter", 1)
    batch = {
        "prompts": prompts(6),
        "params": greedy(6),
        "lora": [None, ("a", 1, adapter)] * 3,
    }
    engine = {"enable_lora": True, "max_lora_rank": 8, "pipeline_parallel_size": 2}
    path = model(models)
    said = [
        run_engine(path, [batch], sipipe={}, tensor_parallel_size=ranks, **engine)
        for ranks in (1, 2)
    ]
    assert tokens(said[0][0]) == tokens(said[1][0])
