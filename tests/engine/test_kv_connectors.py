"""KV connectors: caches that come from, and go to, somewhere else, by all stages."""

import pytest
from tests.engine.engines import (
    Engine,
    assert_stock,
    greedy,
    model,
    prompts,
    shared,
)

pytestmark = pytest.mark.engine

PAGES = {"block_size": 32, "num_gpu_blocks_override": 1024, "max_num_batched_tokens": 1024}
WHOLE = {"microbatches": {"prefill_spread": 1}}
"""vLLM's example of a connector stores a prompt's first chunk for the whole of it."""


def stored_in(directory, **more):
    """On shared storage, which outlives an engine: files of each layer."""
    extra = {"shared_storage_path": str(directory)}
    return {
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            **more,
        }
    }


def asked(count=6):
    return [{"prompts": prompts(count, longest=120, seed=4), "params": greedy(count)}]


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cache_outlives_its_engine(models, tmp_path, stages):
    """What an engine of two stages has stored is loaded by another, of as many stages or one."""
    path, batches = model(models), asked()
    settings = PAGES | stored_in(tmp_path)
    with Engine(path, **shared(2, **WHOLE), **settings) as engine:
        assert_stock(engine.run(batches), path, batches)
        assert not engine.log.read_text().count("Inject KV cache")
    with Engine(path, **shared(stages, **WHOLE), **settings) as engine:
        said = engine.run(batches)
        assert "Inject KV cache" in engine.log.read_text()
    assert_stock(said, path, batches)
    assert any(request["cached"] for request in said[0])
