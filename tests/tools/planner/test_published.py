"""The model beside figures that others have published: the figures lie in the printed ranges.

Throughput: NVIDIA, TensorRT-LLM 1.0, docs/source/performance/perf-overview.md (commit 00f37686):
FP8 checkpoints with FP8 caches, all requests at once, one engine on all GPUs. An engine without
pipeline stages, so this tests devices, memory and tensor parallelism; nothing published tells
SiPipe's stages.

One request: DeepSeek-R1 on 16 H100, tenstorrent/tt-inference-server issue 356; DeepSeek-V3 on 8
GPUs, sgl-project/sglang pull request 2643 (30.3 tokens/s); Qwen3-30B-A3B on an A100,
tt-inference-server issue 340. The launch costs of ``hardware.toml`` are from these, so that they
say whether the model adds up, not whether it predicts.
"""

import pytest
from tests.tools.planner.planned import make_plan

from sipipe.tools.planner.hardware import Cluster, device, network
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.workload import Workload


def stock(model, gpu, count, hosts=1, *, bits=None, **workload):
    cluster = Cluster(
        device=device(gpu),
        hosts=hosts,
        devices_per_host=count,
        network=network(400),
        cores_per_host=96,
    )
    asked = Workload(memory_utilization=0.95, max_num_seqs=4096, **workload)
    plan = make_plan(load_model(model, weight_bits=bits), cluster, asked)
    (found,) = [c for c in plan.choices if c.engine.key == "vllm-async" and c.p == 1]
    return found


@pytest.mark.parametrize(
    ("model", "gpu", "count", "lengths", "published"),
    [
        ("llama-3.1-405b", "h100", 8, (1000, 1000), 2_919),
        ("llama-3.1-405b", "h100", 8, (2048, 2048), 2_296),
        ("llama-3.1-405b", "h100", 8, (5000, 500), 610),
        ("llama-3.1-405b", "h200", 8, (1000, 1000), 3_330),
        ("llama-3.1-405b", "h200", 8, (2048, 2048), 2_948),
        ("llama-3.1-70b", "h100", 2, (1000, 1000), 4_205),
        ("llama-3.1-70b", "h100", 2, (5000, 500), 898),
        ("llama-3.1-8b", "h100", 1, (128, 2048), 22_714),
        ("llama-3.1-8b", "h100", 1, (1000, 1000), 15_220),
        ("llama-3.1-8b", "h100", 1, (20_000, 2000), 1_351),
        ("qwen3-235b-a22b", "h200", 8, (128, 2048), 42_821),
        ("qwen3-235b-a22b", "h200", 8, (1000, 1000), 23_789),
        ("qwen3-235b-a22b", "h200", 8, (2048, 2048), 16_672),
    ],
)
def test_throughput(model, gpu, count, lengths, published):
    found = stock(
        model, gpu, count, bits=8, kv_element_bytes=1.0, input=lengths[0], output=lengths[1]
    )
    low, high = found.range
    assert low <= published <= high
    assert 0.75 <= published / found.throughput <= 1.2


@pytest.mark.parametrize(
    ("model", "gpu", "count", "hosts", "milliseconds"),
    [
        ("deepseek-v3", "h100", 8, 2, 31.2),
        ("deepseek-v3", "h200", 8, 1, 33.0),
        ("qwen3-30b-a3b", "a100", 1, 1, 9.6),
    ],
)
def test_one_request(model, gpu, count, hosts, milliseconds):
    found = stock(model, gpu, count, hosts, input=128, output=128, fixed_batch=1)
    quickest, slowest = found.quickest.delay * 1e3, found.slowest.delay * 1e3
    assert quickest <= milliseconds <= slowest
    assert 0.75 <= found.tpot * 1e3 / milliseconds <= 1.25


def test_launches_hide_behind_products_at_large_batches():
    few, many = (
        stock("deepseek-v3", "h200", 8, input=128, output=1024, fixed_batch=batch)
        for batch in (1, 1024)
    )
    shares = [
        choice.iteration.stages[0].forward["kernel overhead"] / choice.iteration.period
        for choice in (few, many)
    ]
    assert shares[0] > 0.8
    assert shares[1] < 0.2
