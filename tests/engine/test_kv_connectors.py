"""KV connectors: caches that come from, and go to, somewhere else, by all stages."""

from functools import cache

import pytest
from tests.engine.engines import Engine, assert_stock, greedy, model, prompts, shared, tokens

pytestmark = pytest.mark.engine

PAGES = {"block_size": 32, "num_gpu_blocks_override": 1024, "max_num_batched_tokens": 1024}
WHOLE = {"microbatches": {"prefill_spread": 1}}
"""vLLM's example of a connector stores a prompt's first chunk for the whole of it."""


def stored_in(directory, role="kv_both"):
    """On shared storage, which outlives an engine: files of each layer."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": role}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(directory)}
    return {"kv_transfer_config": connector}


def asked(count=6):
    return [{"prompts": prompts(count, longest=120, seed=4), "params": greedy(count)}]


@pytest.mark.slow
def test_a_cache_outlives_its_engine(models, tmp_path):
    """What an engine of two stages has stored is loaded by another, of as many stages or one."""
    path, batches = model(models), asked()
    settings = PAGES | stored_in(tmp_path)
    with Engine(path, **shared(2, **WHOLE), **settings) as engine:
        assert_stock(engine.run(batches), path, batches)
        assert not engine.log.read_text().count("Inject KV cache")
    for stages in (2, 1):
        with Engine(path, **shared(stages, **WHOLE), **settings) as engine:
            said = engine.run(batches)
            assert "Inject KV cache" in engine.log.read_text()
        assert_stock(said, path, batches)
        assert any(request["cached"] for request in said[0])


def on_shelf(directory, *, policy="fail", **extra):
    """Whole blocks, moved while others are served (shelf.py)."""
    return {
        "kv_transfer_config": {
            "kv_connector": "Shelf",
            "kv_connector_module_path": "shelf",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"directory": str(directory), **extra},
        }
    }


FEW = {"block_size": 32, "num_gpu_blocks_override": 60}
BATCHES = [
    {"prompts": prompts(12, longest=300, seed=21), "params": greedy(12, shortest=2, longest=9)},
    {"prompts": prompts(1, longest=300, seed=21), "params": greedy(1)},
]
MANY = [{"prompts": prompts(10, longest=200, seed=22), "params": greedy(10)}]


@pytest.fixture(scope="module")
def stored(models, tmp_path_factory):
    """Where an engine of two stages has stored blocks, by its ranks."""
    path = model(models)

    @cache
    def directory(ranks):
        made = tmp_path_factory.mktemp("shelf")
        with Engine(path, **shared(2, ranks), **FEW, **on_shelf(made)) as engine:
            assert_stock(engine.run([*BATCHES, *MANY]), path, [*BATCHES, *MANY])
        engines = len(list(made.glob("engine-*")))
        assert engines == 1, "all stages have one engine id"
        return made

    return directory


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stages", "ranks", "settings"),
    [
        (2, 1, {}),
        pytest.param(1, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"cpu_sampling": "off"}, marks=pytest.mark.slow),
    ],
)
def test_blocks_come_and_go_while_others_are_served(models, stored, stages, ranks, settings):
    """From two stages to others; prompts in chunks, requests that wait for their blocks, alone and
    beside others, blocks that are held until all workers have stored them."""
    path = model(models)
    with Engine(
        path, **shared(stages, ranks, **settings), **FEW, **on_shelf(stored(ranks))
    ) as engine:
        said = engine.run(BATCHES)
    assert_stock(said, path, BATCHES)
    lengths = [len(prompt) - 1 for prompt in BATCHES[0]["prompts"]]
    assert [request["cached"] for request in said[0]] == [n // 32 * 32 for n in lengths]


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_blocks_that_cannot_be_loaded_are_computed_or_fail_their_request(models, stored, policy):
    path, batches = model(models), MANY
    failing = on_shelf(stored(1), policy=policy, fails=3)
    with Engine(path, **shared(2), **FEW, **failing) as engine:
        said = engine.run(batches)
    if policy == "recompute":
        assert_stock(said, path, batches)
        return
    ends = [request["outputs"][0]["finish_reason"] for request in said[0]]
    assert set(ends) == {"error", "length"}
    told = [i for i, end in enumerate(ends) if end == "length"]
    only = [{key: [values[i] for i in told] for key, values in batches[0].items()}]
    assert_stock([[said[0][i] for i in told]], path, only)


@pytest.mark.slow
def test_several_connectors_and_aborts(models, tmp_path):
    """Every other request is aborted, some while they wait for their blocks; the others are exact."""
    path, directories = model(models), [tmp_path / "a", tmp_path / "b"]
    connectors = []
    for directory in directories:
        directory.mkdir()
        connectors.append(on_shelf(directory)["kv_transfer_config"])
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    batch = {"prompts": prompts(24, longest=250, seed=23), "params": greedy(24, longest=12)}
    aborted = batch | {"aborts": [1 + i // 3 if i % 2 else -1 for i in range(24)]}
    with Engine(path, **shared(2), **FEW, kv_transfer_config=both) as engine:
        [whole] = engine.run([batch])
        [left] = engine.run([aborted])
        [again] = engine.run([batch])
    assert_stock([whole], path, [batch])
    assert tokens(again) == tokens(whole)
    aborted = [i for i, one in enumerate(left) if one is None]
    assert len(aborted) > 4
    assert all(i % 2 for i in aborted)
    assert tokens(left[::2]) == tokens(whole[::2])
    assert len(set(directories[0].iterdir())) == len(set(directories[1].iterdir()))
