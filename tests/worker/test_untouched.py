"""A KV cache on CPUs takes its pages when they are used, and is all zeros before. What room there is
for it, workers count as the engine does."""

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.utils import cpu_resource_utils

from sipipe.ipc import memory
from sipipe.worker.hooks import vllm_workers
from sipipe.worker.hooks.vllm_workers import _UntouchedZeros

SIZE = 256 << 20


def test_zeros_that_nobody_used_take_no_memory():
    own = psutil.Process()
    before = own.memory_info().rss
    with _UntouchedZeros():
        cache = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
        others = torch.zeros(3, 1 << 20), torch.zeros(8, dtype=torch.int8), torch.ones(1 << 20)
    assert own.memory_info().rss - before < SIZE // 2
    assert [other.shape for other in others] == [(3, 1 << 20), (8,), (1 << 20,)]
    assert not cache.data_ptr() % 64
    views = cache.view(torch.bfloat16).view(64, -1)
    views[7] = 1.0
    assert int(views.sum(dtype=torch.float32)) == views.shape[1]
    assert (cache.dtype, cache.shape) == (torch.int8, (SIZE,))


def test_a_worker_counts_memory_as_the_engine_does(monkeypatch):
    if not vllm_workers.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    names = "get_cgroup_memory_limit", "get_cgroup_memory_usage"
    for name in names:  # put back after the test
        monkeypatch.setattr(cpu_resource_utils, name, getattr(cpu_resource_utils, name))

    def make(self):
        self.counts = [getattr(cpu_resource_utils, name) for name in names]

    monkeypatch.setattr(vllm_workers.cpu_worker.CPUWorker, "__init__", make)
    made = vllm_workers.CPUStageWorker()
    assert made.counts == [memory.group_limit, memory.group_used]
