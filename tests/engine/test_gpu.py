"""Two stages on one GPU give stock vLLM's tokens, and no step waits for the device.

docs/gpu.md says what ran on one. :func:`compare` also runs without one.
"""

import os
from itertools import chain

import pytest
from tests.engine import test_parity as parity
from tests.engine.engines import (
    Engine,
    greedy,
    model,
    prompts,
    run_stock,
    same_tokens,
    stock_results,
    tokens,
)
from tests.engine.forks import Forked
from tests.engine.test_second_runner import (
    DRAWS,
    SEES,
    TWINS,
    checkpoint,
    with_both_places,
    with_images,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.engine


def on_gpu(test):
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs(test))


ONE_GPU = {"devices": [0, 0]}
WAITS_ARE_ERRORS = {"VLLM_GPU_SYNC_CHECK": "error"}
"""vLLM's and torch's check makes an error of every wait of a launching thread."""
CHECKED = {"sipipe": ONE_GPU, "env": WAITS_ARE_ERRORS}


def batches():
    """With one that only decodes for long, so that microbatches are planned."""
    asked = prompts(48, seed=11)
    long = {"prompts": asked, "params": greedy(len(asked), shortest=40, longest=90)}
    return [*parity.mixed_batches(), long]


# Of a GPU that stages share, none may look at how much of it is free while it profiles. Little of it
# is asked for, so that tests may run side by side.
LITTLE = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}


def run(path, drawing, batches, *, sipipe=None, env=None, worker="", options=None):
    """What two stages give. ``worker``: its extension."""
    settings = {"samplers": 2, "cpu_sampling": drawing, "vocabulary": "last", **(sipipe or {})}
    ours = {"pipeline_parallel_size": 2, "worker_extension_cls": worker}
    if drawing == "per_row":
        batches = with_both_places(batches)
    with Engine(path, sipipe=settings, env=env, **ours, **LITTLE, **(options or {})) as engine:
        return engine.run(batches)


def compare(path, drawing, batches, *, options=None, **how):
    """Two stages against stock vLLM on the same device, one after the other. ``options``: of both
    engines."""
    found = run(path, drawing, batches, options=options, **how)
    # Kept results are a CPU's, which rounds otherwise.
    stock = run_stock if torch.cuda.is_available() else stock_results
    same_tokens(found, stock(path, batches, **LITTLE, **(options or {})))


@on_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("drawing", ["on", "off", "per_row", "auto"])
def test_no_step_waits_for_the_device(models, drawing, eager):
    options = {"enforce_eager": eager}
    compare(model(models), drawing, batches(), **CHECKED, options=options)


@on_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_shared_output_projection_equals_stock(models, eager):
    """The other stage's part has a thread and a stream of its own."""
    shared = CHECKED | {"sipipe": ONE_GPU | {"vocabulary": "shared"}}
    compare(model(models), "on", batches(), **shared, options={"enforce_eager": eager})


@on_gpu
def test_images_equal_stock_with_graphs(models):
    """M-RoPE: positions in three dimensions."""
    options = {"enforce_eager": False} | SEES
    path = checkpoint(models, "isaac")
    compare(path, "on", with_images("isaac"), sipipe=ONE_GPU, options=options)


@on_gpu
@pytest.mark.parametrize("family", ["mixtral", "falcon_h1"])
def test_families_are_as_near_to_stock_as_stock_in_other_batches(models, family):
    """A mixture of experts and recurrent layers: what else is in a batch changes how stock itself
    rounds, so few requests have other tokens (docs/gpu.md)."""
    path = model(models, family) if family == "mixtral" else checkpoint(models, family)
    options = {"enforce_eager": False}
    found = run(path, "on", batches(), sipipe=ONE_GPU, options=options)
    stock = run_stock(path, batches(), **LITTLE, **options)
    smaller = run_stock(path, batches(), **LITTLE, **options, max_num_seqs=12)

    def others(one):
        both = zip(chain(*map(tokens, one)), chain(*map(tokens, stock)), strict=True)
        return sum(a != b for a, b in both)

    assert others(found) <= others(smaller)


@on_gpu
def test_hidden_states_by_way_of_host_memory_equal_stock(models):
    """Where ``cuda_ipc`` cannot be had; the later stage waits for its copies to the device."""
    compare(model(models), "on", batches(), sipipe=ONE_GPU | {"transport": "shm"})


@pytest.mark.slow
def test_what_is_to_run_on_a_gpu_runs(models):
    """With twins of the sampler's kernels, on a platform that checks no waits."""
    env, worker = DRAWS | WAITS_ARE_ERRORS, TWINS["worker_extension_cls"]
    compare(model(models), "per_row", batches(), env=env, worker=worker)


def test_waits_are_errors_in_what_an_engine_imports(tmp_path):
    """vLLM reads whether they are when it is imported, as the fork server has done; its engines
    import it anew."""
    script = tmp_path / "imported.py"
    script.write_text("import sys; print('vllm.utils.gpu_sync_debug' in sys.modules, flush=True)")
    for env, there in (({}, "True"), (WAITS_ARE_ERRORS, "False")):
        log = tmp_path / f"{there}.log"
        with log.open("w") as out:
            process = Forked(script, env={**os.environ, **env}, out=out)
        process.wait(60)
        process.close()
        assert log.read_text().split() == [there]
