"""Choosing the pipeline and tensor degree: every (p, t) is predicted or ruled out by name."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable

from sipipe.engine.layers.cut import cut_layers
from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner import hardware
from sipipe.tools.planner.communication import volume_per_device
from sipipe.tools.planner.costs import Costs, DatasheetCosts
from sipipe.tools.planner.hardware import Cluster, Engine
from sipipe.tools.planner.memory import Memory, memory_of
from sipipe.tools.planner.pipeline import Iteration, iterate
from sipipe.tools.planner.placement import Placement, place
from sipipe.tools.planner.workload import Workload

__all__ = ["Choice", "Plan", "Prediction", "Rejected", "make_plan", "predict"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One engine on one (p, t), with its best number of running sequences."""

    engine: Engine
    iteration: Iteration
    batch: int
    """Sequences running at once."""
    lowest_tpot: float
    """TPOT of a single running sequence, seconds: no budget below it can be met."""
    capped_by: str
    """What keeps the batch from growing."""
    unmeasured: tuple[str, ...] = ()
    """What of this configuration a calibration never saw; empty for data sheets."""

    @property
    def throughput(self) -> float:
        """Output tokens per second of the whole deployment: T(p, t)."""
        return self.batch / self.iteration.delay

    @property
    def tpot(self) -> float:
        """Mean time per output token, seconds: D(p, t)."""
        return self.iteration.delay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A (p, t) that can serve the workload."""

    p: int
    t: int
    placement: Placement
    cut: tuple[int, ...]
    """Layers of each stage, as SiPipe cuts unless told otherwise; ``placement`` has them where
    they fit the devices' memory."""
    memory: Memory
    best: Prediction
    """With SiPipe."""
    baseline: Prediction | None
    """With the engine compared to; None where there is no prediction for it."""
    baseline_reason: str
    """Why there is none; empty where there is."""
    samplers: int
    """CPU sampler processes."""
    communication_bytes: float
    """Bytes that one device sends for one token of every running sequence: C(p, t)."""

    @property
    def gain(self) -> float | None:
        """Throughput over the baseline's."""
        if self.baseline is None:
            return None
        return self.best.throughput / self.baseline.throughput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A (p, t) that cannot, and why."""

    p: int
    t: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer."""

    facts: ModelFacts
    cluster: Cluster
    workload: Workload
    choices: tuple[Choice, ...]
    """Best first."""
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Choice | None:
        """The first choice; None where nothing fits."""
        return self.choices[0] if self.choices else None


def make_plan(
    facts: ModelFacts,
    cluster: Cluster,
    workload: Workload,
    *,
    costs: Costs | None = None,
    baseline: str = "vllm",
    inflight: int | None = None,
    samplers: int | None = None,
    extrapolate: bool = False,
) -> Plan:
    """Predict every (p, t) with ``p t`` equal to the cluster's devices, and rank what can serve.

    Args:
        facts: the model.
        cluster: the devices; all of them form one deployment.
        workload: what is asked.
        costs: calibrated costs; None takes the data sheets'.
        baseline: the engine to compare SiPipe with.
        inflight: SiPipe's microbatches in flight; None tries p and p + 1.
        samplers: CPU sampler processes; None takes as many as are needed and free.
        extrapolate: predict outside what ``costs`` were calibrated on, marked, instead of
            ruling it out.

    Raises:
        ConfigError: an unknown engine or sampling name, or a bad number; names the option.
    """
    for option, value in (("--inflight", inflight), ("--samplers", samplers)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must be 1 or more, not {value}")
    engines = (hardware.engine("sipipe"), hardware.engine(baseline))
    choices, rejected = [], []
    for p in _divisors(cluster.devices):
        t = cluster.devices // p
        found = _consider(
            facts, cluster, workload, p, t, costs, engines, inflight, samplers, extrapolate
        )
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            choices.append(found)
    choices.sort(key=lambda choice: (-choice.best.throughput, choice.best.tpot))
    return Plan(
        facts=facts,
        cluster=cluster,
        workload=workload,
        choices=tuple(choices),
        rejected=tuple(rejected),
    )


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _consider(
    facts: ModelFacts,
    cluster: Cluster,
    workload: Workload,
    p: int,
    t: int,
    costs: Costs | None,
    engines: tuple[Engine, Engine],
    inflight: int | None,
    samplers: int | None,
    extrapolate: bool,
) -> Choice | Rejected:
    def out(reason: str) -> Rejected:
        return Rejected(p=p, t=t, reason=reason)

    reason = _not_divisible(facts, p, t)
    if reason:
        return out(reason)
    efficiency = hardware.efficiency()
    element = workload.kv_element_bytes or float(facts.activation_bytes)
    measure = functools.partial(
        memory_of,
        facts,
        cluster=cluster,
        efficiency=efficiency,
        utilization=workload.memory_utilization,
        kv_element_bytes=element,
    )
    even = place(facts.layers, p, t, cluster.devices_per_host)
    cut = cut_layers(facts, p, t, device=cluster.device.kind)
    placement = place(facts.layers, p, t, cluster.devices_per_host, cut)
    memory, even_memory = measure(placement), measure(even)
    if _does_not_fit(memory, workload):
        placement, memory = even, even_memory
    reason = _does_not_fit(memory, workload)
    if reason:
        return out(reason)
    if costs is None:
        costs = DatasheetCosts(
            facts=facts,
            cluster=cluster,
            efficiency=efficiency,
            sampling=hardware.sampling(workload.sampling),
            kv_element_bytes=element,
        )
    cores = samplers or cluster.sampler_cores
    ours, theirs = engines
    found = []
    for m in (inflight,) if inflight else (p, p + int(ours.extra)):
        prediction = predict(costs, ours, placement, memory, workload, m, cores, extrapolate)
        if isinstance(prediction, Prediction):
            found.append(prediction)
        else:
            reason = prediction
    if not found:
        return out(reason)
    best = max(found, key=lambda prediction: prediction.throughput)
    other = predict(costs, theirs, even, even_memory, workload, p, cores, extrapolate)
    again = functools.partial(
        iterate, costs, ours, placement, best.iteration.microbatch, inflight=best.iteration.inflight
    )
    volume = volume_per_device(facts.layers, facts.hidden, best.batch, p, t)
    return Choice(
        p=p,
        t=t,
        placement=placement,
        cut=cut,
        memory=memory,
        best=best,
        baseline=other if isinstance(other, Prediction) else None,
        baseline_reason="" if isinstance(other, Prediction) else other,
        samplers=samplers or _enough_samplers(lambda n: again(samplers=n), cores),
        communication_bytes=volume * workload.tokens_per_sequence * facts.activation_bytes,
    )


def _not_divisible(facts: ModelFacts, p: int, t: int) -> str:
    """Why the model cannot be cut this way; empty if it can."""
    attention = facts.attention
    if p > facts.layers:
        return f"{p} stages for {facts.layers} layers"
    if attention.heads % t:
        return f"{attention.heads} attention heads do not divide by t = {t}"
    kv = attention.kv_heads
    if attention.kind == "gqa" and kv % t and t % kv:
        return f"{kv} KV heads and t = {t}: neither divides the other"
    if facts.intermediate % (t * facts.block):
        block = f" into whole blocks of {facts.block}" if facts.block > 1 else ""
        return f"feed-forward width {facts.intermediate} does not divide by t = {t}{block}"
    return ""


def _does_not_fit(memory: Memory, workload: Workload) -> str:
    if memory.short:
        return (
            f"does not fit: stage {memory.stage} needs "
            f"{(memory.weights + memory.workspace) / 1e9:.1f} GB a device for weights and "
            f"workspace, {memory.short / 1e9:.1f} GB more than the "
            f"{memory.available / 1e9:.1f} GB it may use"
        )
    if memory.kv_tokens < workload.longest:
        return (
            f"KV cache holds {memory.kv_tokens:,} tokens, one sequence of "
            f"{workload.longest:,} does not fit"
        )
    return ""


def predict(
    costs: Costs,
    engine: Engine,
    placement: Placement,
    memory: Memory,
    workload: Workload,
    inflight: int,
    samplers: int,
    extrapolate: bool = False,
) -> Prediction | str:
    """The best number of running sequences for one engine and placement, or why there is none.

    Throughput and delay both grow with the batch, so the search is for the largest one within
    the caps; smaller ones are looked at because whole sequences per sampler core and experts
    reached make small steps.
    """

    def run(batch: int) -> Iteration:
        rounds = min(inflight, batch)  # fewer sequences than microbatches: some stay empty
        work = workload.microbatch(math.ceil(batch / rounds))
        return iterate(costs, engine, placement, work, inflight=rounds, samplers=samplers)

    def outside(batch: int) -> tuple[str, ...]:
        work = workload.microbatch(math.ceil(batch / min(inflight, batch)))
        return costs.outside(placement.p, placement.t, work)

    cap, why = _batch_cap(memory, workload, inflight)
    if workload.fixed_batch is not None:
        if workload.fixed_batch > cap:
            return f"--batch {workload.fixed_batch} is over the limit of {cap} set by {why}"
        cap, why = workload.fixed_batch, "--batch"
    if not extrapolate and outside(cap) and workload.fixed_batch is None:
        within = [batch for batch in _candidates(1, cap) if not outside(batch)]
        if within:
            cap, why = within[-1], "calibrated range"
    if not extrapolate and outside(cap):
        unseen = min(map(outside, _candidates(1, cap)), key=len)
        if workload.fixed_batch is not None:
            unseen = outside(cap)
        return "not predicted: " + "; ".join(unseen) + " (--extrapolate predicts it, marked)"
    least = cap if workload.fixed_batch is not None else 1
    if run(least).delay > workload.tpot_slo:
        return (
            f"TPOT {run(least).delay * 1e3:.1f} ms with {least} running sequence(s), over the "
            f"budget of {workload.tpot_slo * 1e3:g} ms"
        )
    if run(cap).delay > workload.tpot_slo:
        cap, why = _largest(lambda batch: run(batch).delay <= workload.tpot_slo, cap), "TPOT budget"
    batch = max(_candidates(least, cap), key=lambda b: (b / run(b).delay, -b))
    if batch < cap:
        why = "no gain from more"
    return Prediction(
        engine=engine,
        iteration=run(batch),
        batch=batch,
        lowest_tpot=run(1).delay,
        capped_by=why,
        unmeasured=(
            *(f"extrapolated: {reason}" for reason in outside(batch)),
            *costs.notes(placement.p, placement.t),
        ),
    )


def _batch_cap(memory: Memory, workload: Workload, inflight: int) -> tuple[int, str]:
    """The most sequences that may run at once, and what says so."""
    kv = max(1, int(memory.kv_tokens // workload.context))
    budget = int(workload.max_num_batched_tokens / workload.tokens_per_sequence) * inflight
    caps = {
        "KV capacity": kv,
        "max-num-seqs": workload.max_num_seqs,
        "max-num-batched-tokens": max(1, budget),
    }
    why = min(caps, key=lambda name: caps[name])
    return caps[why], why


def _largest(good: Callable[[int], bool], above: int) -> int:
    """The largest number below ``above`` that is good, given that 1 is and goodness ends once."""
    low, high = 1, above
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _candidates(least: int, most: int) -> list[int]:
    """About sixteen numbers per doubling from ``least`` to ``most``, both among them."""
    values, value = set(), float(least)
    while value < most:
        values.add(int(value))
        value = max(value + 1, value * 2 ** (1 / 16))
    return sorted(values | {most})


def _enough_samplers(run: Callable[[int], Iteration], cores: int) -> int:
    """The fewest sampler cores that are within one percent of what all ``cores`` reach."""
    wanted = run(cores).period * 1.01
    return 1 + bisect.bisect_left(
        range(1, cores + 1), True, key=lambda samplers: run(samplers).period <= wanted
    )
