"""What vLLM would share between stages because each is a world of its own."""

import ast
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

import vllm
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import all_reduce_utils
from vllm.model_executor.warmup import flashinfer_autotune_cache

from sipipe.messages.stage_place import StagePlace
from sipipe.worker.hooks import world


def test_each_stage_tunes_for_itself(monkeypatch, tmp_path):
    """vLLM's own lookup: two stages of equal configurations have files of their own, each the same at
    its next start."""
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flashinfer_autotune_cache, "flashinfer_autotune_cache_hash", lambda _: "h")
    found = []
    for stage in (0, 1, 0):
        with monkeypatch.context() as process:
            process.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
            world.keep_caches_apart(StagePlace(stage=stage, stages=2, tp_rank=0, tp_size=1))
            found.append(flashinfer_autotune_cache.resolve_flashinfer_autotune_file(None))
    assert found[0] == found[2] != found[1]
    assert all(tmp_path in path.parents for path in found)


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """vLLM's check of which GPUs reach each other, with its answer."""

    def checked(_, input, **__):
        sources, targets, path = pickle.loads(input)
        Path(path).write_bytes(pickle.dumps([True] * len(sources)))
        asked.append(list(zip(sources, targets, strict=True)))
        return SimpleNamespace(check_returncode=lambda: None)

    asked = []
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0")
    monkeypatch.setattr(all_reduce_utils, "_gpu_p2p_access_cache", None)
    monkeypatch.setattr(all_reduce_utils, "subprocess", SimpleNamespace(run=checked))
    platform = SimpleNamespace(device_count=lambda: 4)
    monkeypatch.setattr(all_reduce_utils, "current_platform", platform)
    return asked


class Joined(Exception):
    """The world is about to be made."""


def join(monkeypatch, stage, tp_rank, tp_size=2):
    place = StagePlace(stage=stage, stages=2, tp_rank=tp_rank, tp_size=tp_size)
    module = SimpleNamespace(init_worker_distributed_environment=None)
    config = SimpleNamespace(disable_custom_all_reduce=False, distributed_timeout_seconds=None)

    def made(*_):
        raise Joined

    monkeypatch.setattr(world, "init_batch_invariance", lambda: None)
    monkeypatch.setattr(parallel_state, "init_distributed_environment", made)
    with world.stage_world(place, module), pytest.raises(Joined):
        module.init_worker_distributed_environment(SimpleNamespace(parallel_config=config), 0)


def in_the_world_of(monkeypatch, local_rank):
    """Returns who has entered its barrier."""
    entered = []
    group = SimpleNamespace(local_rank=local_rank, barrier=lambda: entered.append(local_rank))
    monkeypatch.setattr(all_reduce_utils.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: group)
    return entered


def test_a_stage_without_local_rank_0_knows_which_gpus_reach_each_other(monkeypatch, four_gpus):
    with monkeypatch.context() as process:
        in_the_world_of(process, local_rank=2)
        with pytest.raises(FileNotFoundError):
            all_reduce_utils.gpu_p2p_access_check(0, 1)
    for stage, rank in ((1, 1), (1, 0), (0, 0), (0, 1)):
        with monkeypatch.context() as process:
            process.setattr(all_reduce_utils, "_gpu_p2p_access_cache", None)
            join(process, stage, rank)
            entered = in_the_world_of(process, local_rank=2 * stage + rank)
            assert all_reduce_utils.gpu_p2p_access_check(0, 1)
            assert not entered, "nobody, or every rank of the stage"
        assert len(four_gpus) == 1, "the first to come asks"


def test_a_rank_alone_asks_for_no_peers(monkeypatch, four_gpus):
    join(monkeypatch, 1, 0, tp_size=1)
    assert not four_gpus


# ---- every use of the world in vLLM ---------------------------------------------------------------

OFF = "refused at start, or of an executor or connector that SiPipe does not use"
MAKES = (
    "makes or ends this very world, and groups inside of it; stage_world gives it the stage's sizes"
)
FIRST = "says who logs or shows progress: the first rank of each stage"
RIGHT = {
    "distributed/device_communicators/all_reduce_utils.py:gpu_p2p_access_check": (
        "world.find_peers has every rank read its file before, so that none enters the barrier"
    ),
    "distributed/elastic_ep/elastic_execute.py:ElasticEPScalingExecutor.prepare_new_worker": OFF,
    "distributed/elastic_ep/standby_state.py:create_standby_groups": OFF,
    "distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py:"
    "_init_lmcache_engine": "the device's index, which is the worker's own",
    "distributed/kv_transfer/kv_connector/v1/moriio/moriio_connector.py:"
    "MoRIIOConnectorWorker.__init__": "ROCm alone, which SiPipe has no worker for",
    "distributed/parallel_state.py:_engram_dp_shard_size": "data parallelism, which is refused",
    "distributed/parallel_state.py:_init_elastic_ep_world": OFF,
    "distributed/parallel_state.py:_init_stateless_group": OFF,
    "distributed/parallel_state.py:_replace_active_groups": OFF,
    "distributed/parallel_state.py:destroy_distributed_environment": MAKES,
    "distributed/parallel_state.py:ensure_model_parallel_initialized": MAKES,
    "distributed/parallel_state.py:get_inner_dp_world_group": MAKES,
    "distributed/parallel_state.py:get_world_group": MAKES,
    "distributed/parallel_state.py:init_distributed_environment": MAKES,
    "distributed/parallel_state.py:initialize_model_parallel": MAKES,
    "distributed/parallel_state.py:is_global_first_rank": FIRST,
    "distributed/parallel_state.py:is_local_first_rank": FIRST,
    "distributed/stateless_coordinator.py:StatelessGroupCoordinator.__init__": OFF,
    "model_executor/model_loader/weight_utils.py:instanttensor_weights_iterator": (
        "ranks that read the same files together: those of a stage, whose layers are the same"
    ),
    "model_executor/warmup/flashinfer_sparse_mla_warmup.py:"
    "_run_flashinfer_sparse_mla_decode_autotune": "its file is the stage's: keep_caches_apart",
    "model_executor/warmup/kernel_warmup.py:flashinfer_autotune": (
        "its file is the stage's: keep_caches_apart; the barrier is the stage's own"
    ),
    "model_executor/warmup/flashinfer_autotune_cache.py:resolve_rank_flashinfer_autotune_file": (
        "its file is the stage's: keep_caches_apart"
    ),
    "model_executor/warmup/flashinfer_autotune_cache.py:use_flashinfer_autotune_v2": (
        "says no to more than one stage"
    ),
    "model_executor/warmup/flashinfer_sparse_mla_warmup.py:_run_sparse_mla_decode_autotune_v2": (
        "not called with more than one stage"
    ),
    "model_executor/model_loader/runai_streamer_loader.py:"
    "RunaiModelStreamerLoader._get_weights_iterator": "ranks of a stage choose the same files",
    "model_executor/model_loader/weight_cache/daemon.py:WeightCacheDaemon.release_distributed": OFF,
    "model_executor/model_loader/weight_cache/warmup_cache.py:FlashInferWarmupCache."
    "request_params": OFF,
    "v1/simple_kv_offload/sizing.py:sync_num_offload_blocks_across_workers": OFF,
    "v1/executor/multiproc_executor.py:WorkerProc._init_message_queues": OFF,
    "v1/executor/uniproc_executor.py:ExecutorWithExternalLauncher.determine_available_memory": OFF,
    "v1/kv_offload/cpu/spec.py:_all_workers_barrier": (
        "ranks of a stage map the region, then its name is removed; each has slots of its own in "
        "it, so a stage that comes later maps a region of its own, and memory is taken for both"
    ),
    "v1/worker/gpu_model_runner.py:GPUModelRunner.capture_model": (
        "one profile for the host: of local rank 0, a rank of the first stage"
    ),
}
"""Why each use of vLLM's world group is right where the world is one stage."""
WORLDS = {"get_world_group", "get_inner_dp_world_group", "_WORLD", "_INNER_DP_WORLD"}


def uses():
    """Functions of vLLM that name its world, by file."""
    root, found = Path(vllm.__file__).parent, set()

    def look(node, file, names):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        named = getattr(node, "id", getattr(node, "attr", None))
        if names and named in WORLDS and isinstance(node, ast.Name | ast.Attribute):
            found.add(f"{file}:{'.'.join(names)}")
        for child in ast.iter_child_nodes(node):
            look(child, file, names)

    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] == "benchmarks":  # programs of their own
            continue
        text = path.read_text()
        if any(name in text for name in WORLDS):
            look(ast.parse(text), path.relative_to(root).as_posix(), ())
    return found


def test_each_use_of_vllms_world_is_right_for_a_stage():
    """A new one is looked at by somebody, and said here why it is right."""
    assert uses() - RIGHT.keys() == set()
