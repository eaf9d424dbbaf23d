"""Advice of ``serve`` and ``doctor`` on the degrees that suit a host, before anything has run.

It is computed as ``sipipe plan`` does, from what this machine's CPUs are measured to reach. ``sipipe
bench`` measures engines.

Rejected: tokens a second in the advice. The order of degrees was right wherever it was compared with what
was served, and the level 1.1 to 1.6 times too high: two measurements of one machine within a quarter
of an hour differed by 1.8.
"""

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
"""Numbers of requests at once for which advice is computed."""
CLEARLY = 1.1
"""Least ratio of throughputs that is worth a word. Below it the advice would follow from assumptions."""


def on_host(
    facts: ModelFacts,
    name: str,
    devices: int,
    cores: Sequence[Core],
    load: int,
    memory_gib: float | None = None,
) -> list[Choice]:
    """SiPipe's ways to serve requests on a host, fastest first.

    Args:
        facts: the model's sizes.
        name: the devices' name. ``"cpu"`` stands for the cores that the core plan gives the workers.
        devices: devices, or workers on CPUs.
        cores: cores of the host.
        load: requests at once.
        memory_gib: memory of a device, where it is known.
    """
    assumed = Assumed(given=measured() if name == "cpu" else {})
    kind = device(name, memory_gib=memory_gib, parts=devices, assumed=assumed)
    if name == "cpu":
        # `device` gives each worker an even share of all CPUs. The plan gives it fewer.
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
    """Clause with the loads for which other degrees are clearly quicker on this machine's CPUs than
    ``stages`` and ``ranks``, and how much. Empty where none are. Empty also with several NUMA
    nodes: a worker that spans them reads far memory, whose cost is not known here."""
    cores = this_machine()
    workers = stages * ranks
    remarks = []
    if len({core.node for core in cores}) > 1:
        return ""
    # vLLM refuses them, and to share the cores out to a million workers takes minutes.
    if stages > facts.layers or ranks > facts.attention.heads:
        return ""
    for load in LOADS:
        ways = {(c.p, c.t): c for c in on_host(facts, "cpu", workers, cores, load)}
        chosen = ways.get((stages, ranks))
        alternatives = [c for c in ways.values() if c.p == 1]
        alternatives += on_host(facts, "cpu", 2 if workers == 1 else 1, cores, load)
        best = max(alternatives, key=lambda choice: choice.throughput, default=None)
        if chosen and best and best.throughput > CLEARLY * chosen.throughput:
            ratio = best.throughput / chosen.throughput
            remarks.append(f"{load} at once by --pp {best.p} --tp {best.t}, about {ratio:.1f} x")
    return "; ".join(remarks)


def gpus_here() -> list[str]:
    """Name, memory and driver of each GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES shows."""
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = (output("nvidia-smi", *query) or "").splitlines()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return gpus
    shown: list[str] = []
    for name in map(str.strip, visible.split(",")):
        # A name such as GPU-8932f937 is taken as the next one's: a host's are of one kind.
        at = int(name) if name.isdecimal() else -1
        if name.startswith(("GPU-", "MIG-")):
            at = len(shown)
        if not 0 <= at < len(gpus):
            break  # CUDA sees none from there on
        shown.append(gpus[at])
    return shown


def best_degrees(
    platform: Literal["cpu", "cuda"], gpus: Sequence[str], facts: ModelFacts | None = None
) -> tuple[tuple[int, int], Literal["ok", "warning"], str]:
    """Choose degrees for this machine.

    Args:
        platform: what vLLM's build computes on.
        gpus: GPUs as :func:`gpus_here` lists them.
        facts: sizes of the model; None: of one that nearly every machine can hold.

    Returns the stages and ranks that suit many requests, whether they are found, and a line on the
    degrees that suit other loads.
    """
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
    name = max(known, key=len) if platform == "cuda" else "cpu"
    counts = [len(gpus)] if platform == "cuda" else [1, 2]
    best = {}
    for load in LOADS:
        ways = [c for count in counts for c in on_host(facts, name, count, cores, load, memory)]
        if ours := [choice for choice in ways if platform == "cuda" or choice.t == 1]:
            best[load] = max(ours, key=lambda choice: choice.throughput)
    if not best:
        text = f"{facts.name} does not fit these devices: sipipe plan MODEL computes them"
        return every, "warning", text
    by_load = ", ".join(f"{load}: --pp {top.p} --tp {top.t}" for load, top in best.items())
    text = f"by requests at once, {by_load}; computed for {facts.name} as sipipe plan does, not "
    top = best[max(best)]
    return (top.p, top.t), "ok", text + "measured (sipipe bench does)"
