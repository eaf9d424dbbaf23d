"""Choosing the pipeline and tensor degree: every (p, t) is predicted or ruled out by name."""

import bisect
import dataclasses
import math
from collections.abc import Callable

from sipipe.engine.layers.cut import cut_layers
from sipipe.engine.layers.facts import ModelFacts
from sipipe.tools.planner import hardware
from sipipe.tools.planner.communication import volume_per_device
from sipipe.tools.planner.costs import DatasheetCosts
from sipipe.tools.planner.hardware import Cluster, Engine
from sipipe.tools.planner.pipeline import Iteration, iterate
from sipipe.tools.planner.placement import Memory, Placement, place
from sipipe.tools.planner.workload import Microbatch, Workload


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


class _RuledOutError(Exception):
    """Why a (p, t), or one engine on it, cannot serve the workload."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """For every (p, t) with ``p t`` equal to the cluster's devices a prediction, or why not."""

    costs: DatasheetCosts
    """Of the model on the cluster, all of which is one deployment; calibrated or data sheets'."""
    workload: Workload
    baseline: str = "vllm"
    """The engine to compare SiPipe with."""
    inflight: int | None = None
    """SiPipe's microbatches in flight, 1 or more; None tries p and p + 1."""
    samplers: int | None = None
    """CPU sampler processes, 1 or more; None takes as many as are needed and free."""
    extrapolate: bool = False
    """Predict outside what ``costs`` were calibrated on, marked, instead of ruling it out."""

    @property
    def ours(self) -> Engine:
        return hardware.engine("sipipe")

    def plan(self) -> Plan:
        """Predict every (p, t), and rank what can serve.

        Raises:
            ConfigError: an unknown engine or sampling name; names the option.
        """
        cluster = self.costs.cluster
        choices, rejected = [], []
        for p in range(1, cluster.devices + 1):
            t, rest = divmod(cluster.devices, p)
            if rest:
                continue
            try:
                choices.append(self.consider(p, t))
            except _RuledOutError as reason:
                rejected.append(Rejected(p=p, t=t, reason=str(reason)))
        choices.sort(key=lambda choice: (-choice.best.throughput, choice.best.tpot))
        return Plan(
            facts=self.costs.facts,
            cluster=cluster,
            workload=self.workload,
            choices=tuple(choices),
            rejected=tuple(rejected),
        )

    def consider(self, p: int, t: int) -> Choice:
        """The best deployment with ``p`` stages of ``t`` ranks, and the baseline on the same.

        Raises:
            _RuledOutError: there is none.
        """
        facts, cluster, workload = self.costs.facts, self.costs.cluster, self.workload
        if reason := _indivisible(facts, p, t):
            raise _RuledOutError(reason)
        even = place(facts.layers, p, t, cluster.devices_per_host)
        cut = cut_layers(facts, p, t, device=cluster.device.kind)
        placement = place(facts.layers, p, t, cluster.devices_per_host, cut)
        memory, even_memory = (
            self.costs.memory(of, workload.memory_utilization) for of in (placement, even)
        )
        if _lack(memory, workload):
            placement, memory = even, even_memory
        if reason := _lack(memory, workload):
            raise _RuledOutError(reason)
        cores = self.samplers or cluster.sampler_cores
        best = self._best_inflight(placement, memory, cores)
        baseline, reason = None, ""
        try:
            baseline = self._predict(hardware.engine(self.baseline), even, even_memory, p, cores)
        except _RuledOutError as error:
            reason = str(error)
        volume = volume_per_device(facts.layers, facts.hidden, best.batch, p, t)
        return Choice(
            p=p,
            t=t,
            placement=placement,
            cut=cut,
            memory=memory,
            best=best,
            baseline=baseline,
            baseline_reason=reason,
            samplers=self.samplers or self._enough_samplers(placement, best.iteration, cores),
            communication_bytes=volume * workload.tokens_per_sequence * facts.activation_bytes,
        )

    def _best_inflight(self, placement: Placement, memory: Memory, cores: int) -> Prediction:
        """The better of p and p + 1 microbatches in flight, or what was asked for."""
        found, reason = [], _RuledOutError()
        p = placement.p
        for m in (self.inflight,) if self.inflight else (p, p + int(self.ours.extra)):
            try:
                found.append(self._predict(self.ours, placement, memory, m, cores))
            except _RuledOutError as error:
                reason = error
        if not found:
            raise reason
        return max(found, key=lambda prediction: prediction.throughput)

    def _predict(
        self, engine: Engine, placement: Placement, memory: Memory, inflight: int, samplers: int
    ) -> Prediction:
        """The best number of running sequences for one engine and placement.

        Throughput and delay both grow with the batch, so the search is for the largest one within
        the caps; smaller ones are looked at because whole sequences per sampler core and experts
        reached make small steps.

        Raises:
            _RuledOutError: there is none within the budget or the calibrated range.
        """
        costs, workload = self.costs, self.workload

        def work(batch: int) -> tuple[Microbatch, int]:
            rounds = min(inflight, batch)  # fewer sequences than microbatches: some stay empty
            return workload.microbatch(math.ceil(batch / rounds)), rounds

        def run(batch: int) -> Iteration:
            each, rounds = work(batch)
            return iterate(costs, engine, placement, each, inflight=rounds, samplers=samplers)

        def outside(batch: int) -> tuple[str, ...]:
            return costs.outside(placement.t, work(batch)[0])

        least, cap, why = 1, *_batch_cap(memory, workload, inflight)
        if workload.fixed_batch is not None:
            least = workload.fixed_batch
            if least > cap:
                raise _RuledOutError(f"--batch {least} is over the limit of {cap} set by {why}")
            cap, why = least, "--batch"
        if not self.extrapolate and outside(cap):
            tried = _candidates(least, cap)
            within = [batch for batch in tried if not outside(batch)]
            if not within:
                fewest = min(tried, key=lambda batch: len(outside(batch)))
                unseen = "; ".join(outside(fewest))
                raise _RuledOutError(f"not predicted: {unseen} (--extrapolate predicts it, marked)")
            cap, why = within[-1], "calibrated range"
        if (tpot := run(least).delay) > workload.tpot_slo:
            raise _RuledOutError(
                f"TPOT {tpot * 1e3:.1f} ms with {least} running sequence(s), over the "
                f"budget of {workload.tpot_slo * 1e3:g} ms"
            )
        if run(cap).delay > workload.tpot_slo:
            cap, why = _largest(lambda n: run(n).delay <= workload.tpot_slo, cap), "TPOT budget"
        batch = max(_candidates(least, cap), key=lambda b: (b / run(b).delay, -b))
        return Prediction(
            engine=engine,
            iteration=run(batch),
            batch=batch,
            lowest_tpot=run(1).delay,
            capped_by=why if batch == cap else "no gain from more",
            unmeasured=(
                *(f"extrapolated: {reason}" for reason in outside(batch)),
                *costs.notes(placement.p, placement.t),
            ),
        )

    def _enough_samplers(self, placement: Placement, best: Iteration, cores: int) -> int:
        """The fewest sampler cores that are within one percent of what all ``cores`` reach."""

        def period(samplers: int) -> float:
            return iterate(
                self.costs,
                self.ours,
                placement,
                best.microbatch,
                inflight=best.inflight,
                samplers=samplers,
            ).period

        wanted = period(cores) * 1.01
        return 1 + bisect.bisect_left(
            range(1, cores + 1), True, key=lambda samplers: period(samplers) <= wanted
        )


def _indivisible(facts: ModelFacts, p: int, t: int) -> str:
    """Why the model cannot be cut this way; empty if it can."""
    attention, kv = facts.attention, facts.attention.kv_heads
    if p > facts.layers:
        return f"{p} stages for {facts.layers} layers"
    if attention.heads % t:
        return f"{attention.heads} attention heads do not divide by t = {t}"
    if attention.kind == "gqa" and kv % t and t % kv:
        return f"{kv} KV heads and t = {t}: neither divides the other"
    if facts.intermediate % (t * facts.block):
        block = f" into whole blocks of {facts.block}" if facts.block > 1 else ""
        return f"feed-forward width {facts.intermediate} does not divide by t = {t}{block}"
    return ""


def _lack(memory: Memory, workload: Workload) -> str:
    """What keeps a single sequence from fitting; empty if it fits."""
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
    return 1 + bisect.bisect_left(range(2, above), True, key=lambda number: not good(number))


def _candidates(least: int, most: int) -> list[int]:
    """About sixteen numbers per doubling from ``least`` to ``most``, both among them."""
    values, value = set(), float(least)
    while value < most:
        values.add(int(value))
        value = max(value + 1, value * 2 ** (1 / 16))
    return sorted(values | {most})
