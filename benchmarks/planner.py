"""The planner against the paper's figures and published ones.

``python -m benchmarks.planner`` computes two tables; nothing is measured.

*Findings*: what the paper measured on its H100 and A100 testbeds, beside what the model predicts
from data sheets.

*Published*: tensor parallelism on H100 and H200 as NVIDIA has published it, beside the model's
ranges.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import report
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import Cluster, device, network
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.plan import OURS, Choice
from sipipe.tools.planner.search import Search
from sipipe.tools.planner.workload import Workload

# --- the paper's findings ----------------------------------------------------------------------


Side = dict[tuple[int, int], Choice]


def sides(model: str, *, gpu: str, hosts: int, batch: int, adapters: int = 1) -> tuple[Side, Side]:
    """The paper's workload: ShareGPT lengths, all sampling strategies, a fixed batch.

    SiPipe's choices and those of the paper's baseline, by (p, t)."""
    cluster = Cluster(
        device=device(gpu),
        hosts=hosts,
        devices_per_host=8,
        network=network(400, adapters),
        cores_per_host=96,
    )
    workload = Workload(
        input=161, output=338, fixed_batch=batch, max_num_seqs=batch, sampling="all"
    )
    costs = datasheet_costs(load_model(model), cluster, workload)
    plan = Search(costs=costs, workload=workload, baseline="vllm").plan()
    ours: Side = {}
    stock: Side = {}
    for choice in plan.choices:
        (ours if choice.engine.key == OURS else stock)[choice.p, choice.t] = choice
    return ours, stock


def most(side: Side) -> float:
    return max(choice.throughput for choice in side.values())


def findings() -> list[dict[str, Any]]:
    """One row per figure of the paper."""
    rows = []

    def add(what: str, paper: str, model: str) -> None:
        rows.append({"what": what, "paper": paper, "model": model})

    large = ("llama-3.1-70b", "qwen2.5-72b", "mixtral-8x7b")
    ultra = ("llama-3.1-405b", "deepseek-v2.5", "deepseek-v3")
    on16 = {name: sides(name, gpu="h100", hosts=2, batch=1024) for name in ultra}
    on8 = {name: sides(name, gpu="h100", hosts=1, batch=512) for name in large}
    a100 = {name: sides(name, gpu="a100", hosts=1, batch=512) for name in large}
    peaks = {
        name: max(stock, key=lambda degree: stock[degree].throughput)[0]
        for name, (_, stock) in on16.items()
    }
    add("16 H100, stock: p of the peak", "2 or 4", ", ".join(f"{n} {p}" for n, p in peaks.items()))
    ours, stock = on16["deepseek-v3"]
    pure = stock[1, 16].throughput
    add("DeepSeek-V3, best stock pipeline / pure TP", "3.2 x", f"{most(stock) / pure:.1f} x")
    _, alone = sides("deepseek-v3", gpu="h100", hosts=2, batch=1024, adapters=8)
    add("the same, an adapter a GPU", "", f"{most(alone) / alone[1, 16].throughput:.1f} x")
    add("DeepSeek-V3, best SiPipe / pure TP", "4.5 x", f"{most(ours) / pure:.1f} x")
    gains = [most(ours) / most(stock) for ours, stock in on16.values()]
    add("16 H100, best SiPipe / best stock", "1.4-1.7 x", f"{min(gains):.1f}-{max(gains):.1f} x")
    ahead = [stock[1, 8].throughput / stock[2, 4].throughput for _, stock in on8.values()]
    add("8 H100, stock TP 8 / stock P2T4", "above 1", f"{min(ahead):.2f}-{max(ahead):.2f} x")
    for name, found in (("H100", on8), ("A100", a100)):
        gain = [ours[2, 4].throughput / stock[2, 4].throughput for ours, stock in found.values()]
        paper = "1.6-2.1 x" if name == "H100" else "smaller"
        add(f"8 {name}, SiPipe / stock at P2T4", paper, f"{min(gain):.1f}-{max(gain):.1f} x")
    stages = on8["qwen2.5-72b"][1][4, 2].iteration.stages
    surplus = stages[-1].occupancy / stages[-2].occupancy - 1
    add("Qwen2.5-72B P4T2 stock, last stage longer by", "22-40 %", f"{surplus:.0%}")
    share = stages[-1].preparation / stages[-1].occupancy
    add("the same, preparation", "12-19 %", f"{share:.0%}")
    return rows


# --- what others have published ----------------------------------------------------------------

LENGTHS = (
    *((128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000)),
    *((2048, 128), (2048, 2048), (5000, 500), (20_000, 2000)),
)
PUBLISHED: dict[tuple[str, str, int], tuple[int | None, ...]] = {
    ("llama-3.1-405b", "h100", 8): (3627, 4340, 3116, 3994, 2919, 2895, 453, 2296, 610, 345),
    ("llama-3.1-405b", "h200", 8): (3814, 5348, 4741, 4724, 3330, 3722, 456, 2948, 650, 505),
    ("llama-3.1-70b", "h100", 2): (6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437),
    ("llama-3.1-70b", "h200", 1): (3803, 4336, 2872, 3666, 2909, 2994, 442, 2003, 566, 283),
    ("llama-3.1-8b", "h100", 1): (
        *(28_312, 22_714, 14_325, 17_660, 15_220, 13_899, 3450, 9305, 3459, 1351),
    ),
    ("llama-3.1-8b", "h200", 1): (
        *(27_911, 26_221, 18_027, 20_770, 17_744, 16_828, 3538, 12_194, 3902, 1804),
    ),
    ("qwen3-235b-a22b", "h100", 8): (
        *(None, 19_658, 12_447, 18_351, 14_898, 15_136, None, 9924, 3225, None),
    ),
    ("qwen3-235b-a22b", "h200", 8): (
        *(30_429, 42_821, 26_852, 28_026, 23_789, 22_061, 3331, 16_672, 3623, 1876),
    ),
}
"""Output tokens a second at ``LENGTHS`` by model (its Llama-3.3 for Llama-3.1's 70B), GPU and
tensor-parallel ranks: every FP8 row on H100 and H200 of a model that is built in, of NVIDIA's
TensorRT-LLM 1.0, docs/source/performance/perf-overview.md (commit 00f37686). All requests at once,
one engine on all GPUs."""


def tensor_parallel(
    model: str, gpu: str, count: int, hosts: int = 1, bits: int | None = None, **workload: Any
) -> Choice:
    """Stock vLLM on one stage of all devices."""
    cluster = Cluster(
        device=device(gpu),
        hosts=hosts,
        devices_per_host=count,
        network=network(400),
        cores_per_host=96,
    )
    asked = Workload(memory_utilization=0.95, max_num_seqs=4096, **workload)
    costs = datasheet_costs(load_model(model, weight_bits=bits), cluster, asked)
    plan = Search(costs=costs, workload=asked).plan()
    (found,) = [c for c in plan.choices if c.engine.key == "vllm-async" and c.p == 1]
    return found


def published() -> list[dict[str, Any]]:
    """One row per model and GPU, and one of all."""
    rows, every = [], []
    for (model, gpu, count), rates in PUBLISHED.items():
        told = [(lengths, rate) for lengths, rate in zip(LENGTHS, rates, strict=True) if rate]
        found = {
            (prompt, output): tensor_parallel(
                model, gpu, count, bits=8, kv_element_bytes=1.0, input=prompt, output=output
            )
            for (prompt, output), _ in told
        }
        usual = found[1000, 1000]
        low, high = usual.slowest.throughput, usual.quickest.throughput
        shares = [
            (rate / found[lengths].throughput, found[lengths], rate) for lengths, rate in told
        ]
        every += shares
        row = {
            "model": f"{model}, {count} {gpu.upper()}",
            "published, 1000 in, 1000 out": dict(told)[1000, 1000],
            "model's tok/s": round(usual.throughput),
            "range": f"{low:,.0f}-{high:,.0f}",
        }
        rows.append(row | _within(shares))
    return [*rows, dict.fromkeys(rows[0]) | {"model": "all"} | _within(every)]


def _within(shares: list[tuple[float, Choice, int]]) -> dict[str, str]:
    inside = [
        choice.slowest.throughput <= rate <= choice.quickest.throughput
        for _, choice, rate in shares
    ]
    ratios = sorted(share for share, _, _ in shares)
    return {
        "lengths in the range": f"{sum(inside)} of {len(inside)}",
        "published / model": f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: nothing is measured")
    parser.parse_args()
    report("planner", "The paper's findings and the model's", findings(), file="planner-findings")
    report(
        "planner",
        "Tensor parallelism as published and as the model has it",
        published(),
        note="FP8 models, 8-bit cache, TensorRT-LLM 1.0",
        file="planner-published",
    )


if __name__ == "__main__":
    main()
