"""Choosing the pipeline and tensor degree: every (p, t) is predicted or ruled out by name."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.cut import cut_layers, layer_split, share_projection
from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner import hardware
from sipipe.tools.planner.communication import volume_per_device
from sipipe.tools.planner.costs import DatasheetCosts
from sipipe.tools.planner.hardware import Assumed, Case, Engine
from sipipe.tools.planner.pipeline import Iteration, iterate
from sipipe.tools.planner.placement import Memory, Placement, place
from sipipe.tools.planner.plan import OURS, Choice, End, Gain, Plan, Rejected
from sipipe.tools.planner.workload import Microbatch, Workload

_KV = "KV capacity"


class _RuledOutError(Exception):
    """Why an engine on a (p, t) cannot serve the workload."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """For both engines and every (p, t) with ``p t`` equal to the cluster's devices a prediction,
    or why not."""

    costs: DatasheetCosts
    """Of the model on the cluster, all of which is one deployment; calibrated or data sheets'."""
    workload: Workload
    baseline: str | None = None
    """The engine to compare SiPipe with. None: vLLM as it is by default, with asynchronous
    scheduling on GPUs; on CPUs, where vLLM has its first runner, without."""
    inflight: int | None = None
    """SiPipe's microbatches in flight, 1 or more; None tries p and p + 1."""
    samplers: int | None = None
    """CPU sampler processes, 1 or more; None takes as many as are needed and free."""
    extrapolate: bool = False
    """Predict outside what ``costs`` were calibrated on, marked, instead of ruling it out."""
    cpu_sampling: str = "auto"
    """SiPipe's setting. On GPUs the engine shares the output projection out with ``"on"`` only."""
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Assumed inputs that the user states (:func:`sipipe.tools.planner.hardware.assumptions`)."""

    def plan(self) -> Plan:
        """Predict every (p, t) with both engines, and rank what can serve.

        Raises:
            ConfigError: an unknown engine or sampling name; names the option.
        """
        cluster = self.costs.cluster
        free = cluster.sampler_cores
        if (self.samplers or 0) > free:
            raise ConfigError(
                f"--samplers {self.samplers}: a host of {cluster.cores_per_host} cores has {free} "
                f"left beside {cluster.devices_per_host} workers and the engine (--cores says more)"
            )
        usual = "vllm-async" if cluster.device.kind == "gpu" else "vllm"
        choices, rejected = [], []
        for key in (OURS, self.baseline or usual):
            engine = hardware.engine(key, Assumed(given=self.given))
            for p in range(1, cluster.devices + 1):
                t, rest = divmod(cluster.devices, p)
                if rest:
                    continue
                try:
                    choices.append(self.consider(engine, p, t))
                except _RuledOutError as reason:
                    rejected.append(Rejected(engine=key, p=p, t=t, reason=str(reason)))
        choices.sort(key=lambda choice: (-choice.throughput, choice.tpot))
        plan = Plan(
            facts=self.costs.facts,
            cluster=cluster,
            workload=self.workload,
            choices=tuple(choices),
            rejected=tuple(rejected),
            gain=None,
        )
        return dataclasses.replace(plan, gain=self._gain(plan.fastest(True), plan.fastest(False)))

    def consider(self, engine: Engine, p: int, t: int) -> Choice:
        """The best deployment of ``engine`` with ``p`` stages of ``t`` ranks.

        Raises:
            _RuledOutError: there is none.
        """
        facts, cluster = self.costs.facts, self.costs.cluster
        if reason := _indivisible(facts, p, t):
            raise _RuledOutError(reason)
        per_host = cluster.devices_per_host
        if engine.key == OURS and per_host % t:
            raise _RuledOutError(
                f"SiPipe keeps the {t} ranks of a stage on one host, which has {per_host} devices"
            )
        even = cut = layer_split(facts.layers, p)
        ways: list[tuple[tuple[int, ...], tuple[float, ...]]] = [(even, ())]
        if engine.key == OURS:
            cut = self._cut(p, t)
            ways.insert(0, (cut, ()))
            kind = cluster.device.kind
            if p > 1 and cluster.hosts == 1 and (kind == "cpu" or self.cpu_sampling == "on"):
                ways.append((even, share_projection(facts, cut, even, t, device=kind)[0]))
        reasons: list[str] = []
        found = [
            choice
            for layers, heads in dict.fromkeys(ways)
            for choice in self._with_layers(engine, p, t, cut, layers, heads, reasons)
        ]
        if not found:
            raise _RuledOutError(reasons[-1])
        return max(found, key=lambda choice: choice.throughput)

    def _cut(self, p: int, t: int) -> tuple[int, ...]:
        """The layers of SiPipe's stages, as it cuts them unless told otherwise."""
        device = self.costs.cluster.device
        usable = device.memory_bytes * self.workload.memory_utilization
        return cut_layers(
            self.costs.facts,
            p,
            t,
            device=device.kind,
            kv_loss=SiPipeConfig().kv_loss,
            memory=math.inf if device.kind == "cpu" else usable,
        )

    def _with_layers(
        self,
        engine: Engine,
        p: int,
        t: int,
        cut: tuple[int, ...],
        layers: tuple[int, ...],
        heads: tuple[float, ...],
        reasons: list[str],
    ) -> Iterator[Choice]:
        """Predictions with stages of ``layers``, and ``heads`` as :func:`place` has them;
        ``reasons`` gets why there are none."""
        workload, cluster = self.workload, self.costs.cluster
        per_host = cluster.devices_per_host
        placement = place(self.costs.facts.layers, p, t, per_host, layers, heads)
        memory = self.costs.memory(placement, workload.memory_utilization)
        if reason := _lack(memory, workload):
            reasons.append(reason)
            return
        cores = self.samplers or cluster.sampler_cores
        asked = self.inflight if engine.key == OURS else None
        for inflight in (asked,) if asked else dict.fromkeys((p, p + int(engine.extra))):
            try:
                yield self._predict(engine, placement, cut, memory, inflight, cores)
            except _RuledOutError as error:
                reasons.append(str(error))

    def _at(self, case: Case, choice: Choice, *, shared: bool = True) -> End:
        """``choice`` with assumed inputs at one end of their ranges; without ``shared`` those
        that both engines have in common stay where they are."""
        assumed, workload = Assumed(case, self.given), self.workload
        engine = hardware.engine(choice.engine.key, assumed)
        costs = dataclasses.replace(
            self.costs, sampling=hardware.sampling(workload.sampling, assumed)
        )
        batches, tokens = [choice.batch], choice.memory.kv_tokens
        if shared:
            cluster = hardware.at_end(costs.cluster, assumed)
            costs = dataclasses.replace(
                costs, efficiency=hardware.efficiency(assumed), cluster=cluster
            )
            memory = costs.memory(choice.placement, workload.memory_utilization)
            tokens = max(0, memory.kv_tokens)
            if workload.fixed_batch is None:
                cap, _ = _batch_cap(memory, workload, choice.inflight)
                batches.append(cap if choice.capped_by == _KV else min(choice.batch, cap))
        else:
            engine = dataclasses.replace(engine, uneven=choice.engine.uneven)

        def delay(batch: int) -> float:
            rounds = min(choice.inflight, batch)
            each, where = workload.microbatch(math.ceil(batch / rounds)), choice.placement
            found = iterate(costs, engine, where, each, inflight=rounds, samplers=choice.samplers)
            return found.delay

        delays = [delay(batch) for batch in batches]
        rates = [batch / seconds for batch, seconds in zip(batches, delays, strict=True)]
        quickest = case == "quickest"
        return End(
            throughput=max(rates) if quickest else min(rates),
            delay=min(delays) if quickest else max(delays),
            kv_tokens=tokens,
        )

    def _gain(self, ours: Choice | None, other: Choice | None) -> Gain | None:
        if ours is None or other is None:
            return None

        def ratio(own: Case, others: Case) -> float:
            mine = self._at(own, ours, shared=False).throughput
            return mine / self._at(others, other, shared=False).throughput

        return Gain(
            stated=ours.throughput / other.throughput,
            low=ratio("slowest", "quickest"),
            high=ratio("quickest", "slowest"),
        )

    def _predict(
        self,
        engine: Engine,
        placement: Placement,
        cut: tuple[int, ...],
        memory: Memory,
        inflight: int,
        samplers: int,
    ) -> Choice:
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
        best, facts = run(batch), costs.facts
        volume = volume_per_device(facts.layers, facts.hidden, batch, placement.p, placement.t)
        on_host = engine.sampling == "host"
        enough = self.samplers or self._enough_samplers(engine, placement, best, samplers)
        per_host = costs.cluster.devices_per_host
        plain = place(facts.layers, placement.p, placement.t, per_host)
        even = costs.memory(plain, workload.memory_utilization).kv_tokens
        stated = End(throughput=batch / best.delay, delay=best.delay, kv_tokens=memory.kv_tokens)
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
            samplers=enough if on_host else 0,
            communication_bytes=volume * workload.tokens_per_sequence * facts.activation_bytes,
            unmeasured=(
                *(f"extrapolated: {reason}" for reason in outside(batch)),
                *costs.notes(placement.p, placement.t),
            ),
        )
        return dataclasses.replace(
            choice, quickest=self._at("quickest", choice), slowest=self._at("slowest", choice)
        )

    def _enough_samplers(
        self, engine: Engine, placement: Placement, best: Iteration, cores: int
    ) -> int:
        """The fewest sampler cores that are within one percent of what all ``cores`` reach."""

        def period(samplers: int) -> float:
            return iterate(
                self.costs,
                engine,
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
    if memory.kv_tokens < workload.min_kv_tokens:
        return (
            f"KV cache holds {memory.kv_tokens:,} tokens, under --min-kv-tokens "
            f"{workload.min_kv_tokens:,}"
        )
    return ""


def _batch_cap(memory: Memory, workload: Workload, inflight: int) -> tuple[int, str]:
    """The most sequences that may run at once, and what says so."""
    kv = max(1, int(memory.kv_tokens // workload.context))
    budget = int(workload.max_num_batched_tokens / workload.tokens_per_sequence) * inflight
    caps = {
        _KV: kv,
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
