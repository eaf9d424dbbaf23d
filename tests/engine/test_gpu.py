"""Two stages on one GPU give stock vLLM's tokens, and no step waits for the device.

docs/gpu.md says what ran on one. :func:`compare` also runs without one.
"""

import os

import pytest
from tests.engine import test_parity as parity
from tests.engine.engines import Engine, model, run_stock, same_tokens, stock_results
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


def compare(path, drawing, batches, *, sipipe=None, env=None, worker="", options=None):
    """Two stages against stock vLLM on the same device, one after the other. ``worker``: its
    extension; ``options``: of both engines."""
    # Of a GPU that stages share, none may look at how much of it is free while it profiles.
    # Little of it is asked for, so that tests may run side by side.
    options = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28, **(options or {})}
    settings = {"samplers": 2, "cpu_sampling": drawing, "vocabulary": "last", **(sipipe or {})}
    ours = {"pipeline_parallel_size": 2, "worker_extension_cls": worker}
    if drawing == "per_row":
        batches = with_both_places(batches)
    with Engine(path, sipipe=settings, env=env, **ours, **options) as engine:
        found = engine.run(batches)
    # Kept results are a CPU's, which rounds otherwise.
    stock = run_stock if torch.cuda.is_available() else stock_results
    same_tokens(found, stock(path, batches, **options))


@on_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("drawing", ["on", "per_row", "auto"])
def test_no_step_waits_for_the_device(models, drawing, eager):
    compare(
        model(models),
        drawing,
        parity.mixed_batches(),
        sipipe=ONE_GPU,
        env=WAITS_ARE_ERRORS,
        options={"enforce_eager": eager},
    )


@on_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_shared_output_projection_equals_stock(models, eager):
    """The other stage's part has a thread and a stream of its own."""
    compare(
        model(models),
        "on",
        parity.mixed_batches(),
        sipipe=ONE_GPU | {"vocabulary": "shared"},
        env=WAITS_ARE_ERRORS,
        options={"enforce_eager": eager},
    )


@on_gpu
@pytest.mark.parametrize("family", ["mixtral", "falcon_h1", "isaac"])
def test_families_equal_stock_with_graphs(models, family):
    """A mixture of experts, recurrent layers, M-RoPE with images."""
    batches, options = parity.mixed_batches(), {"enforce_eager": False}
    path = model(models, family) if family == "mixtral" else checkpoint(models, family)
    if family == "isaac":
        batches, options = with_images(family), options | SEES
    compare(path, "on", batches, sipipe=ONE_GPU, options=options)


@on_gpu
def test_hidden_states_by_way_of_host_memory_equal_stock(models):
    """Where ``cuda_ipc`` cannot be had; the later stage waits for its copies to the device."""
    compare(model(models), "on", parity.mixed_batches(), sipipe=ONE_GPU | {"transport": "shm"})


@pytest.mark.slow
def test_what_is_to_run_on_a_gpu_runs(models):
    """With twins of the sampler's kernels, on a platform that checks no waits."""
    compare(
        model(models),
        "per_row",
        parity.mixed_batches(),
        env=DRAWS | WAITS_ARE_ERRORS,
        worker=TWINS["worker_extension_cls"],
    )


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
