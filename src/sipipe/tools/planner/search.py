"""Choosing the pipeline and tensor degree: every (p, t) is predicted or ruled out by name."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.bonds import boundaries, broken
from sipipe.engine.layers.cut import (
    cut_layers,
    layer_split,
    most_stages,
    nearest_even,
    share_projection,
)
from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner import hardware
from sipipe.tools.planner.costs import DatasheetCosts, volume_per_device
from sipipe.tools.planner.drafts import worth_of_drafts
from sipipe.tools.planner.hardware import Assumed, Case, Engine
from sipipe.tools.planner.pipeline import Iteration, iterate
from sipipe.tools.planner.placement import Memory, Placement, place
from sipipe.tools.planner.plan import OURS, Choice, DraftWorth, End, Gain, Plan, Rejected
from sipipe.tools.planner.workload import Workload

_KV = "KV capacity"


class _RuledOutError(Exception):
    """Why an engine on a (p, t) cannot serve the workload."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """For both engines and every (p, t) whose product is the devices: a prediction, or why not."""

    costs: DatasheetCosts
    """Costs of the model on the cluster, all of which is one deployment."""
    workload: Workload
    baseline: str | None = None
    """The engine to compare SiPipe with. None: vLLM as it is by default, with asynchronous
    scheduling on GPUs; on CPUs, where vLLM has its first runner, without."""
    inflight: int | None = None
    """SiPipe's microbatches in flight, 1 or more; None tries p and p + 1."""
    samplers: int | None = None
    """CPU sampler processes, 1 or more; None takes as many as are needed and free."""
    cpu_sampling: str = "auto"
    """SiPipe's setting. On GPUs the engine shares the output projection out with ``"on"`` only."""
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Assumed inputs that the user states (:func:`sipipe.tools.planner.hardware.assumptions`)."""
    drafts: int = 0
    """Drafts of a head whose worth is predicted, at most; 0: it is not."""
    acceptance: float = 0.7
    """Probability that a draft is right if those before it are."""

    def plan(self) -> Plan:
        """Predict every (p, t) with both engines, and rank what can serve. Raises ConfigError: an
        unknown engine or sampling name; names the option."""
        cluster = self.costs.cluster
        free = cluster.sampler_cores
        if (self.samplers or 0) > free:
            raise ConfigError(
                f"--samplers {self.samplers}: a host of {cluster.cores_per_host} cores has {free} "
                f"left beside {cluster.devices_per_host} workers and the engine (--cores says more)"
            )
        usual = "vllm-async" if cluster.device.kind == "gpu" else "vllm"
        choices = []
        rejected = []
        for key in (OURS, self.baseline or usual):
            engine = hardware.engine(key, Assumed(given=self.given))
            for p in (p for p in range(1, cluster.devices + 1) if cluster.devices % p == 0):
                try:
                    choices.append(self._best(engine, p, cluster.devices // p))
                except _RuledOutError as reason:
                    rejected.append(Rejected(key, p, cluster.devices // p, str(reason)))
        choices.sort(key=lambda choice: (-choice.throughput, choice.tpot))
        plan = Plan(
            facts=self.costs.facts,
            cluster=cluster,
            workload=self.workload,
            front_end=self.costs.front_end,
            choices=tuple(choices),
            rejected=tuple(rejected),
        )
        ours = plan.fastest(True)
        return dataclasses.replace(
            plan,
            gain=self._gain(ours, plan.fastest(False)),
            drafts=self._worth_of_drafts(ours),
        )

    def _worth_of_drafts(self, ours: Choice | None) -> DraftWorth | None:
        """Predict what drafts would add to SiPipe's fastest choice."""
        if ours is None or not self.drafts:
            return None
        workload = dataclasses.replace(
            self.workload, drafts=self.drafts, acceptance=self.acceptance
        )
        samplers = self.samplers or self.costs.cluster.sampler_cores
        return worth_of_drafts(self.costs, workload, ours, samplers)

    def _best(self, engine: Engine, p: int, t: int) -> Choice:
        """The best deployment of ``engine`` with ``p`` stages of ``t`` ranks, or _RuledOutError."""
        facts = self.costs.facts
        cluster = self.costs.cluster
        ours = engine.key == OURS
        per_host = cluster.devices_per_host
        device = cluster.device
        _check_divisible(facts, p, t)
        if p > most_stages(facts):
            raise _RuledOutError(
                f"{facts.bonds[0]} have to be on one stage, which leaves room for "
                f"{most_stages(facts)} stages"
            )
        if ours and per_host % t:
            raise _RuledOutError(
                f"SiPipe keeps the {t} ranks of a stage on one host, which has {per_host} devices"
            )
        even = cut = layer_split(facts.layers, p)
        if ours:
            even = nearest_even(facts.layers, p, boundaries(facts.bonds, facts.layers))
        elif (bond := broken(facts.bonds, even)) is not None:
            raise _RuledOutError(f"its even cut takes {bond} apart, which have to be on one stage")
        ways: dict[tuple[tuple[int, ...], tuple[float, ...]], None] = {(even, ()): None}
        if ours:
            usable = device.memory_bytes * self.workload.memory_utilization
            limit = math.inf if device.kind == "cpu" else usable
            kv_loss = SiPipeConfig().kv_loss
            cut = cut_layers(facts, p, t, device=device.kind, kv_loss=kv_loss, memory=limit)
            ways = {(cut, ()): None} | ways
            if p > 1 and cluster.hosts == 1 and (device.kind == "cpu" or self.cpu_sampling == "on"):
                ways[even, share_projection(facts, cut, even, t, device=device.kind)[0]] = None
        inflight_asked = self.inflight if ours else None
        reason = _RuledOutError()
        choices = list[Choice]()
        for layers, projections in ways:
            placement = place(facts.layers, p, t, per_host, layers, projections)
            for inflight in (
                (inflight_asked,) if inflight_asked else dict.fromkeys((p, p + int(engine.extra)))
            ):
                try:
                    choices.append(self._predict(engine, placement, cut, inflight))
                except _RuledOutError as error:
                    reason = error
        if not choices:
            raise reason
        return max(choices, key=lambda choice: choice.throughput)

    def _run(
        self, engine: Engine, where: Placement, batch: int, inflight: int, samplers: int
    ) -> Iteration:
        """The steady state of ``batch`` sequences; of fewer than microbatches some stay empty."""
        rounds = min(inflight, batch)
        work = self.workload.microbatch(math.ceil(batch / rounds))
        return iterate(self.costs, engine, where, work, inflight=rounds, samplers=samplers)

    def _predict(
        self, engine: Engine, placement: Placement, cut: tuple[int, ...], inflight: int
    ) -> Choice:
        """The best number of running sequences for one engine and placement: the largest within the
        caps, or a smaller one, as whole sequences per sampler core and experts make small steps.
        Raises _RuledOutError: there is none within the budget."""
        costs = self.costs
        workload = self.workload
        facts = self.costs.facts
        memory = costs.memory(placement, workload.memory_utilization)
        _check_fits(memory, workload)
        p = placement.p
        t = placement.t
        cores = self.samplers or costs.cluster.sampler_cores

        def run(batch: int, samplers: int = cores) -> Iteration:
            return self._run(engine, placement, batch, inflight, samplers)

        least = 1
        cap, why = _batch_cap(memory, workload, inflight)
        if workload.fixed_batch is not None:
            if (least := workload.fixed_batch) > cap:
                raise _RuledOutError(f"--batch {least} is over the limit of {cap} set by {why}")
            cap = least
            why = "--batch"
        if (tpot := run(least).delay) > workload.tpot_slo:
            raise _RuledOutError(
                f"TPOT {tpot * 1e3:.1f} ms with {least} running sequence(s), over the "
                f"budget of {workload.tpot_slo * 1e3:g} ms"
            )
        if run(cap).delay > workload.tpot_slo:
            cap = _first(lambda n: run(n + 1).delay > workload.tpot_slo, cap)
            why = "TPOT budget"
        batch = max(_candidates(least, cap), key=lambda b: (b / run(b).delay, -b))
        best = run(batch)
        # The fewest samplers that are within one percent of what all cores reach.
        wanted = best.period * 1.01
        enough = self.samplers or _first(lambda n: run(batch, n).period <= wanted, cores + 1)
        plain = place(facts.layers, p, t, costs.cluster.devices_per_host)
        even = costs.memory(plain, workload.memory_utilization).kv_tokens
        volume = volume_per_device(facts.layers, facts.hidden, batch, p, t)
        stated = End(batch / best.delay, best.delay, memory.kv_tokens)
        choice = Choice(
            engine=engine,
            placement=placement,
            cut=cut,
            memory=memory,
            kv_loss=1.0 - memory.kv_tokens / even if even > 0 else 0.0,
            iteration=best,
            quickest=stated,
            slowest=stated,
            inflight=inflight,
            batch=batch,
            lowest_tpot=run(1).delay,
            capped_by=why if batch == cap else "no gain from more",
            samplers=enough if engine.sampling == "host" else 0,
            communication_bytes=volume * workload.tokens_per_sequence * facts.activation_bytes,
        )
        return dataclasses.replace(
            choice, quickest=self._at("quickest", choice), slowest=self._at("slowest", choice)
        )

    def _at(self, case: Case, choice: Choice, *, shared: bool = True) -> End:
        """``choice`` with assumed inputs at one end of their ranges; without ``shared`` those
        that both engines have in common stay where they are."""
        assumed = Assumed(case, self.given)
        workload = self.workload
        engine = hardware.engine(choice.engine.key, assumed)
        drawing = hardware.sampling(workload.sampling, assumed)
        costs = dataclasses.replace(self.costs, sampling=drawing)
        batches = [choice.batch]
        tokens = choice.memory.kv_tokens
        if shared:
            cluster = hardware.at_end(costs.cluster, assumed)
            efficiency = hardware.efficiency(assumed)
            costs = dataclasses.replace(costs, efficiency=efficiency, cluster=cluster)
            memory = costs.memory(choice.placement, workload.memory_utilization)
            tokens = max(0, memory.kv_tokens)
            if workload.fixed_batch is None:
                cap, _ = _batch_cap(memory, workload, choice.inflight)
                batches.append(cap if choice.capped_by == _KV else min(choice.batch, cap))
        else:
            engine = dataclasses.replace(engine, uneven=choice.engine.uneven)
        where = choice.placement
        inflight = choice.inflight
        samplers = choice.samplers
        search = dataclasses.replace(self, costs=costs)
        delays = [search._run(engine, where, n, inflight, samplers).delay for n in batches]
        rates = [batch / seconds for batch, seconds in zip(batches, delays, strict=True)]
        if case == "quickest":
            return End(max(rates), min(delays), tokens)
        return End(min(rates), max(delays), tokens)

    def _gain(self, ours: Choice | None, other: Choice | None) -> Gain | None:
        if ours is None or other is None:
            return None

        def ratio(own: Case, others: Case) -> float:
            mine = self._at(own, ours, shared=False).throughput
            return mine / self._at(others, other, shared=False).throughput

        stated = ours.throughput / other.throughput
        return Gain(stated, ratio("slowest", "quickest"), ratio("quickest", "slowest"))


def _check_divisible(facts: ModelFacts, p: int, t: int) -> None:
    """Raises _RuledOutError: the model cannot be cut this way."""
    attention = facts.attention
    kv = facts.attention.kv_heads
    if p > facts.layers:
        raise _RuledOutError(f"{p} stages for {facts.layers} layers")
    if attention.heads % t:
        raise _RuledOutError(f"{attention.heads} attention heads do not divide by t = {t}")
    if attention.kind == "gqa" and kv % t and t % kv:
        raise _RuledOutError(f"{kv} KV heads and t = {t}: neither divides the other")
    if facts.intermediate % (t * facts.block):
        block = f" into whole blocks of {facts.block}" if facts.block > 1 else ""
        raise _RuledOutError(
            f"feed-forward width {facts.intermediate} does not divide by t = {t}{block}"
        )


def _check_fits(memory: Memory, workload: Workload) -> None:
    """Raises _RuledOutError: what keeps a single sequence from fitting."""
    if memory.short:
        raise _RuledOutError(
            f"does not fit: stage {memory.stage} needs "
            f"{(memory.weights + memory.workspace) / 1e9:.1f} GB a device for weights and "
            f"workspace, {memory.short / 1e9:.1f} GB more than the "
            f"{memory.available / 1e9:.1f} GB it may use"
        )
    holds = f"KV cache holds {memory.kv_tokens:,} tokens,"
    if memory.kv_tokens < workload.longest:
        raise _RuledOutError(f"{holds} one sequence of {workload.longest:,} does not fit")
    if memory.kv_tokens < workload.min_kv_tokens:
        raise _RuledOutError(f"{holds} under --min-kv-tokens {workload.min_kv_tokens:,}")


def _batch_cap(memory: Memory, workload: Workload, inflight: int) -> tuple[int, str]:
    """The most sequences that may run at once, and what says so."""
    budget = int(workload.max_num_batched_tokens / workload.tokens_per_sequence) * inflight
    caps = {
        _KV: max(1, int(memory.kv_tokens // workload.context)),
        "max-num-seqs": workload.max_num_seqs,
        "max-num-batched-tokens": max(1, budget),
    }
    why = min(caps, key=lambda name: caps[name])
    return caps[why], why


def _first(holds: Callable[[int], bool], below: int) -> int:
    """The first number from 1 on that holds, as do all after it; none below ``below - 1``: that."""
    return 1 + bisect.bisect_left(range(1, below - 1), True, key=holds)


def _candidates(least: int, most: int) -> list[int]:
    """About sixteen numbers per doubling from ``least`` to ``most``, both among them."""
    values = set()
    value = float(least)
    while value < most:
        values.add(int(value))
        value = max(value + 1, value * 2 ** (1 / 16))
    return sorted(values | {most})
