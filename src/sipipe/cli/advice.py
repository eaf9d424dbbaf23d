"""Which degrees suit a host, by requests at once: what ``serve`` and ``doctor`` say before anything
has run. Computed as ``sipipe plan`` does; what CPUs reach is measured. ``sipipe bench`` measures all."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sipipe.cores import Core, plan_cores, this_machine
from sipipe.engine.layers.facts import ModelFacts
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import Assumed, Cluster, device, names, network
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.plan import OURS, Choice
from sipipe.tools.planner.search import Search
from sipipe.tools.planner.this_cpu import measured
from sipipe.tools.planner.workload import Workload
from sipipe.tools.provenance import output

LOADS = (1, 16, 256)
"""Requests at once for which it is computed."""
CLEARLY = 1.1
"""Quicker by less than this says nothing: some inputs are assumed."""


def on_host(
    facts: ModelFacts,
    name: str,
    devices: int,
    cores: Sequence[Core],
    load: int,
    memory_gib: float | None = None,
) -> list[Choice]:
    """SiPipe's ways to serve ``load`` requests at once on a host with these ``cores``, fastest
    first. ``name`` is its devices', each of ``memory_gib`` where that is known; ``"cpu"``: what the
    core plan gives so many workers."""
    found = Assumed(given=measured() if name == "cpu" else {})
    kind = device(name, memory_gib=memory_gib, parts=devices, assumed=found)
    if name == "cpu":  # of an even share of all cores
        (workers,) = {len(rank) for rank in plan_cores(cores, stages=devices).workers[0]}
        part = min(workers * devices, len(cores)) / len(os.sched_getaffinity(0))
        kind = replace(kind, memory_gbs=kind.memory_gbs * part, bf16_tflops=kind.bf16_tflops * part)
    workload = Workload(input=200, output=200, fixed_batch=load)
    cluster = Cluster(
        device=kind,
        hosts=1,
        devices_per_host=devices,
        network=network(100),
        cores_per_host=len(cores),
    )
    plan = Search(costs=datasheet_costs(facts, cluster, workload), workload=workload).plan()
    return [choice for choice in plan.choices if choice.engine.key == OURS]


def quicker_on_cpus(facts: ModelFacts, stages: int, ranks: int) -> str:
    """For how many requests other degrees are quicker on this machine's CPUs than these, with the
    numbers; empty where none clearly are, or NUMA nodes are several: a worker that spans them reads
    far memory, which nothing here knows."""
    cores, found, parts = this_machine(), [], stages * ranks
    if len({core.node for core in cores}) > 1:
        return ""
    for load in LOADS:
        ways = {(c.p, c.t): c for c in on_host(facts, "cpu", parts, cores, load)}
        asked = ways.get((stages, ranks))
        others = [c for c in ways.values() if c.p == 1]
        others += on_host(facts, "cpu", 2 if parts == 1 else 1, cores, load)
        best = max(others, key=lambda choice: choice.throughput, default=None)
        if asked and best and best.throughput > CLEARLY * asked.throughput:
            found.append(
                f"{load} at once {best.throughput:,.0f} tok/s with --pp {best.p} --tp {best.t} and "
                f"{asked.throughput:,.0f} with --pp {stages} --tp {ranks}"
            )
    return "; ".join(found)


def gpus_here() -> list[str]:
    """Name, memory and driver of each GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves."""
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    found = (output("nvidia-smi", *query) or "").splitlines()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return found
    shown: list[str] = []
    for one in map(str.strip, visible.split(",")):
        # A name such as GPU-8932f937 is taken as the next one's: a host's are of one kind.
        at = len(shown) if one.startswith(("GPU-", "MIG-")) else int(one) if one.isdigit() else -1
        if not 0 <= at < len(found):
            break  # CUDA sees none from there on
        shown.append(found[at])
    return shown


def best_degrees(
    platform: Literal["cpu", "cuda"], gpus: Sequence[str], facts: ModelFacts | None = None
) -> tuple[tuple[int, int], Literal["ok", "warning"], str]:
    """(stages, ranks) that suit this machine for many requests, and a line on which loads suit which;
    ``facts``: of a model, else of one that nearly every machine can hold."""
    cores = this_machine()
    nodes = len({core.node for core in cores})
    first = gpus[0] if gpus and platform == "cuda" else ""
    words = set(re.findall(r"\w+", first.split(",")[0].lower()))
    known = [name for name in names() if words.issuperset(name.split("-"))]
    total = re.search(r"(\d+) MiB", first)
    memory = int(total[1]) / 1024 if total else None
    every = (1, max(1, len(gpus)))
    if platform == "cpu" and nodes > 1:
        text = f"--pp {nodes}, a stage for each NUMA node, whose memory it reads; one request at a "
        return (nodes, 1), "ok", text + "time is quickest with --pp 1"
    if platform == "cuda" and not known:
        return every, "ok", "sipipe plan MODEL --gpu NAME computes them (--list: known names)"
    facts = facts or load_model("llama-3.1-8b" if platform == "cuda" else "qwen3-0.6b")
    name, counts = (max(known, key=len), [len(gpus)]) if platform == "cuda" else ("cpu", [1, 2])
    best = {}
    for load in LOADS:
        ways = [c for count in counts for c in on_host(facts, name, count, cores, load, memory)]
        if ours := [choice for choice in ways if platform == "cuda" or choice.t == 1]:
            best[load] = max(ours, key=lambda choice: choice.throughput)
    if not best:
        text = f"{facts.name} does not fit these devices: sipipe plan MODEL computes them"
        return every, "warning", text
    told = ", ".join(
        f"{load}: --pp {top.p} --tp {top.t} ({top.throughput:,.0f} tok/s)"
        for load, top in best.items()
    )
    text = f"by requests at once, {told}; computed for {facts.name} as sipipe plan does, not "
    top = best[max(best)]
    return (top.p, top.t), "ok", text + "measured (sipipe bench does)"
