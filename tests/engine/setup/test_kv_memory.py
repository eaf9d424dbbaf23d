"""Memory of a CPU engine's KV caches, in a container, and beside weights of which only files tell."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from transformers import LlamaConfig
from vllm import EngineArgs
from vllm.utils import cpu_resource_utils

from sipipe.cores import CorePlan
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.setup import kv_memory
from sipipe.engine.setup.checkpoint import weight_files
from sipipe.errors import ConfigError, ResourceError
from sipipe.ipc import memory

MIB = 1 << 20
GIB = 1 << 30
TWO = CorePlan(workers=(((0,),), ((0,),)), samplers=((0,),), scheduler=(0,))


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    if not kv_memory.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    for name in ("get_cgroup_memory_limit", "get_cgroup_memory_usage"):  # put back after the test
        monkeypatch.setattr(cpu_resource_utils, name, getattr(cpu_resource_utils, name))


def configuration(model: str, size: int | None = None, **places: str) -> SimpleNamespace:
    """The configuration of a model whose quantization tells no bits per weight."""
    quantized = LlamaConfig(quantization_config={"quant_method": "compressed-tensors"})
    share = EngineArgs.gpu_memory_utilization
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=size, gpu_memory_utilization=share),
        load_config=SimpleNamespace(load_format="auto", download_dir=places.get("cache")),
        speculative_config=None,
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            hf_config=quantized,
            hf_text_config=quantized,
            dtype=torch.bfloat16,
            get_total_num_hidden_layers=lambda: quantized.num_hidden_layers,
        ),
    )


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0/meminfo").exists(), reason="no nodes")
def test_files_that_a_container_has_read_leave_room_for_caches(tmp_path, monkeypatch):
    """The weights are such files after an earlier start. The limit may be that of a group around."""
    files = {"box/memory.max": "max", "memory.max": GIB, "memory.current": 1000 * MIB}
    files["memory.stat"] = f"file {900 * MIB}\ninactive_file {800 * MIB}\nactive_file {64 * MIB}"
    (tmp_path / "box").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "control_groups", lambda _: (tmp_path / "box", tmp_path))
    free = GIB - (1000 - 864) * MIB
    planned = kv_memory.share_kv_memory(configuration(str(tmp_path)), [TWO], (16, 16), None)
    assert planned == pytest.approx(0.4 * free / 2, abs=MIB)
    # vLLM's workers find the same.
    assert cpu_resource_utils.get_memory_node_info(0).available_memory == free
    assert cpu_resource_utils.get_memory_node_info(0).total_memory == GIB
    named = configuration(str(tmp_path), size=800 * MIB)
    assert kv_memory.share_kv_memory(named, [TWO], (16, 16), None) is None


@pytest.mark.parametrize("size", [0, -1])
def test_no_memory_at_all_is_refused_by_the_options_name(tmp_path, size):
    """0 is a size that the user has named, and not the share of --gpu-memory-utilization."""
    named = configuration(str(tmp_path), size=size)
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes .* must be above 0, not"):
        kv_memory.share_kv_memory(named, [TWO], (16, 16), None)


def test_nodes_of_a_container_share_its_room(monkeypatch):
    info = cpu_resource_utils.MemoryNodeInfo(64 * GIB, 60 * GIB)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: info)
    monkeypatch.setattr(kv_memory, "group_limit", lambda: 32 * GIB)
    monkeypatch.setattr(kv_memory, "group_used", lambda: 2 * GIB)
    assert kv_memory.kv_cache_bytes([0, 1], 10 * GIB) == pytest.approx(0.4 * 20 * GIB / 2, abs=MIB)
    with pytest.raises(ResourceError, match=r"this container has 30\.0 GiB free"):
        kv_memory.kv_cache_bytes([0, 1], 40 * GIB)


def sparse(file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.truncate(size)


def test_a_draft_model_takes_room_beside_the_model(tmp_path, monkeypatch):
    """A head in the model's own files does not."""
    info = cpu_resource_utils.MemoryNodeInfo(16 * GIB, 10 * GIB)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: info)
    sparse(tmp_path / "model" / "model.safetensors", 4 * GIB)
    sparse(tmp_path / "draft" / "model.safetensors", 2 * GIB)
    config = configuration(str(tmp_path / "model"))
    for name, weights in (("model", 4), ("draft", 6)):
        drafting = SimpleNamespace(model=str(tmp_path / name), revision=None)
        config.speculative_config = SimpleNamespace(
            method="draft_model", draft_model_config=drafting
        )
        planned = kv_memory.share_kv_memory(config, [TWO], (16, 16), None)
        assert planned == pytest.approx(0.4 * (10 - weights) * GIB / 2, abs=MIB)


@pytest.mark.parametrize("where", ["directory", "hub's cache", "nowhere"])
def test_weights_of_unknown_width_are_as_many_as_their_files(tmp_path, monkeypatch, where):
    info = cpu_resource_utils.MemoryNodeInfo(16 * GIB, 10 * GIB)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: info)
    repository = tmp_path / "models--org--name"
    folders = {"directory": tmp_path, "hub's cache": repository / "snapshots" / "abc"}
    if where in folders:
        sparse(folders[where] / "model-1.safetensors", 4 * GIB)
        sparse(folders[where] / "model-2.safetensors", 2 * GIB)
    if where == "hub's cache":
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
    model = str(tmp_path) if where == "directory" else "org/name"
    config = configuration(model, cache=str(tmp_path))
    assert decoder_of(config).facts is None
    planned = kv_memory.share_kv_memory(config, [TWO], (16, 16), None)
    weights = 6 * GIB if where in folders else 0
    assert planned == pytest.approx(0.4 * (10 * GIB - weights) / 2, abs=MIB)
    # One of two hosts loads half of them.
    own_plan = CorePlan(workers=TWO.workers[:1], samplers=(), scheduler=(0,))
    planned = kv_memory.share_kv_memory(config, [own_plan], (16, 16), None)
    assert planned == pytest.approx(0.4 * (10 * GIB - weights // 2), abs=MIB)
    if where == "directory":
        sparse(tmp_path / "model-3.safetensors", 4 * GIB)
        with pytest.raises(
            ResourceError, match=r"node 0 has 10\.0 GiB.*weights .* 2 workers load take 10\.0 GiB"
        ) as it:
            kv_memory.share_kv_memory(config, [TWO], (16, 16), None)
        assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("load_format", "there", "loaded"),
    [
        ("auto", "a.safetensors b.bin c.pt", "a.safetensors"),
        ("auto", "b.bin training_args.bin c.pt", "b.bin"),
        ("auto", "c.pt optimizer.pt", "c.pt"),
        ("mistral", "a.safetensors consolidated.safetensors", "consolidated.safetensors"),
        ("pt", "a.safetensors b.bin c.pt", "c.pt"),
        ("npcache", "a.safetensors b.bin c.pt", "b.bin"),
        ("auto", "tokenizer.json", ""),
    ],
)
def test_files_are_picked_as_vllm_picks_them(tmp_path, load_format, there, loaded):
    for name in there.split():
        (tmp_path / name).touch()
    assert weight_files(tmp_path, load_format) == {tmp_path / name for name in loaded.split()}
