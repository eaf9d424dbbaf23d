"""What of a machine a stage worker takes: its cores, with all of its threads, and its GPU's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.arithmetic_stages import INFLIGHT, boot_of, place_of  # noqa: E402
from vllm.sequence import IntermediateTensors  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402

from sipipe.ipc.link.schema import TensorSchema, buffer_bytes  # noqa: E402
from sipipe.messages.stage_place import StagePlace  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.hooks.vllm_workers import GPUStageWorker  # noqa: E402
from sipipe.worker.loaded_stage import link_bytes  # noqa: E402
from sipipe.worker.projection.share import ProjectionShare  # noqa: E402

TOKENS = 2048


class Worker(GPUStageWorker):
    """Without a model."""

    def __init__(self):
        pass


def reserved(runner, transport):
    return link_bytes(runner, boot_of(place_of(1, 2), transport=transport))


@pytest.mark.parametrize(
    ("device", "transport", "requests", "rows"),
    [
        ("cuda:1", "auto", 256, 512),
        ("cuda:1", "cuda_ipc", 1024, 1024),
        ("cuda:1", "shm", 256, 512),  # by way of host memory
        ("cpu", "auto", 256, 0),
    ],
)
def test_what_a_link_takes_of_a_gpu_is_known_before_the_kv_cache_is_sized(
    monkeypatch, device, transport, requests, rows
):
    kept = {
        key: torch.zeros(TOKENS, 64, dtype=torch.bfloat16) for key in ("hidden_states", "residual")
    }
    worker = Worker()
    worker.model_runner = SimpleNamespace(
        intermediate_tensors=IntermediateTensors(kept),
        speculator=None,
        device=torch.device(device),
        max_num_reqs=requests,
        max_num_tokens=TOKENS,
    )
    worker.reserved = reserved(worker.model_runner, transport)
    assert worker.reserved == INFLIGHT * rows * 2 * 64 * 2
    schema = TensorSchema.capture(kept, TOKENS)
    assert not rows or worker.reserved == INFLIGHT * buffer_bytes(schema, rows)

    monkeypatch.setattr(gpu_worker.Worker, "determine_available_memory", lambda _: 10 << 30)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    assert worker.determine_available_memory() == (10 << 30) - worker.reserved
    worker.cache_config.kv_cache_memory_bytes = 1 << 30  # the user's own size
    assert worker.determine_available_memory() == 10 << 30


@pytest.mark.parametrize(
    ("device", "stage", "parts", "columns"),
    [
        ("cuda:0", 0, (0.25, 0.75), 1000),
        ("cuda:0", 1, (0.25, 0.75), 0),  # the model's own
        ("cuda:0", 0, (), 0),
        ("cpu", 0, (0.25, 0.75), 0),
    ],
)
def test_what_a_part_of_the_output_projection_takes_of_a_gpu(device, stage, parts, columns):
    """Its rows, what it makes of them and a copy, and what comes from the last stage."""
    model = SimpleNamespace(
        get_vocab_size=lambda: 8000, get_hidden_size=lambda: 64, dtype=torch.bfloat16
    )
    boot = SimpleNamespace(
        place=StagePlace(stage=stage, stages=2, tp_rank=0, tp_size=2),
        parts=parts,
        vllm_config=SimpleNamespace(model_config=model),
        watched=SimpleNamespace(inflight=INFLIGHT),
    )
    runner = SimpleNamespace(device=torch.device(device), max_num_reqs=16)
    taken = ProjectionShare(boot, SimpleNamespace(model_runner=runner), HostDevice()).device_bytes()
    assert taken == (2 * (columns * (64 + 2 * 16) + INFLIGHT * 16 * 64) if columns else 0)


def test_a_first_stage_has_no_link_before_it():
    runner = SimpleNamespace(intermediate_tensors=None, device=torch.device("cuda:0"))
    assert reserved(runner, "auto") == 0
