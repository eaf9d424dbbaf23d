"""A KV cache on CPUs takes its pages when they are used, and is all zeros before."""

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.worker.vllm_workers import _UntouchedZeros

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
