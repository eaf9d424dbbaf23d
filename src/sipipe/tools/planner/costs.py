"""Seconds that each part of an iteration takes, from the data sheets in ``hardware.toml``; and the
volume of what travels between devices (docs/planner.md, sections 5 and 8)."""

import dataclasses
import math
from collections.abc import Mapping

from sipipe.engine.layers.facts import Attention, ModelFacts
from sipipe.tools.planner import hardware
from sipipe.tools.planner.hardware import (
    Assumed,
    Cluster,
    Efficiency,
    Engine,
    FrontEnd,
    Sampling,
)
from sipipe.tools.planner.placement import Memory, Placement, Stage, kv_bytes, weight_bytes
from sipipe.tools.planner.workload import Microbatch, Workload

_MICRO = 1e-6
_NANO = 1e-9
CPU_KV_SHARE = 0.4
"""The same as in :mod:`sipipe.engine.setup.kv_memory`, which cannot be imported without vLLM."""


def roofline(compute: float, memory: float, sharpness: float) -> float:
    """Time of a kernel that takes ``compute`` seconds of arithmetic and ``memory`` of traffic:
    ``(compute^k + memory^k)^(1/k)``, because a real kernel overlaps the two imperfectly."""
    sharpness = max(sharpness, 0.01)  # below that the sum is larger than any number
    larger = max(compute, memory)
    smaller = min(compute, memory)
    if smaller == 0.0:
        return larger
    return larger * math.pow(1.0 + math.pow(smaller / larger, sharpness), 1.0 / sharpness)


def _flops_per_context(attention: Attention, *, decode: bool) -> float:
    """FLOPs of one token for each token that it attends to, all heads: a new one, or a prompt's."""
    if attention.kind != "mla":
        return 4.0 * attention.heads * attention.head_dim
    if decode:  # absorbed form: scores and values in the latent space
        return 2.0 * attention.heads * (2 * attention.kv_rank + attention.rope_dim)
    # expanded form: ordinary heads
    return 2.0 * attention.heads * (attention.head_dim + attention.rope_dim + attention.value_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasheetCosts:
    """Costs from the data sheets and the efficiencies of ``hardware.toml``, in seconds; memory in bytes."""

    facts: ModelFacts
    cluster: Cluster
    efficiency: Efficiency
    sampling: Sampling
    front_end: FrontEnd
    kv_element_bytes: float

    @property
    def _flops(self) -> float:
        device = self.cluster.device
        efficiency = self.efficiency
        peak = device.flops(self.facts.arithmetic_bits)
        wide = peak == device.flops(16)
        return peak * (efficiency.compute if wide else efficiency.compute_narrow)

    @property
    def _bandwidth(self) -> float:
        return self.cluster.device.memory_gbs * 1e9 * self.efficiency.memory

    @property
    def _layer_us(self) -> float:
        """Microseconds of a layer besides its products, attention and all-reduces."""
        efficiency = self.efficiency
        return efficiency.cpu_layer_us if self._on_cpus else efficiency.layer_us

    @property
    def _on_cpus(self) -> bool:
        """True if the devices are CPUs."""
        return self.cluster.device.kind == "cpu"

    def memory(self, placement: Placement, utilization: float) -> Memory:
        """The stage whose cache holds the fewest tokens: every token needs all stages."""
        available = self.cluster.device.memory_bytes
        workspace = 0.0
        share = CPU_KV_SHARE  # of what the weights leave
        if not self._on_cpus:
            available *= utilization
            workspace = self.efficiency.workspace_gib * 2.0**30
            share = 1.0
        stages = []
        for stage in placement.stages:
            weights = weight_bytes(self.facts, stage)
            token_bytes = kv_bytes(self.facts, stage, self.kv_element_bytes)
            tokens = int((available - weights - workspace) * share // token_bytes)
            stages.append(Memory(stage.index, weights, workspace, available, tokens))
        return min(stages, key=lambda memory: (memory.kv_tokens, -memory.weights))

    def forward(self, stage: Stage, work: Microbatch, *, gather: bool) -> dict[str, float]:
        """Device time of ``stage`` for the model's own work, by cause as the tables name it;
        ``gather``: the last stage collects logits on every rank."""
        compute, weights = self._products(stage, work)
        causes = {
            "compute": compute,
            "weight reads": weights,
            "attention": self._attention(stage, work),
            "kernel overhead": self._overhead(stage, compute + weights),
            "all-reduce": self._all_reduce(stage, work),
            "logits": self._logits(stage, work, gather=gather) if stage.projection else 0.0,
        }
        if work.drafts and stage.is_last:
            causes["draft head"] = self._draft_head(stage, work)
        return causes

    def _draft_head(self, stage: Stage, work: Microbatch) -> float:
        """Seconds of a head of one layer, like the model's last, and the output projection: one pass a
        draft, the first over the rows that were verified."""
        layer = dataclasses.replace(stage, layer_range=stage.layer_range[-1:])
        verified = dataclasses.replace(work, tokens=work.rows, drafts=0)
        draft_pass = dataclasses.replace(work, tokens=work.batch, drafts=0)
        after_the_pass = sum(self.forward(layer, verified, gather=False).values())
        after_a_draft = sum(self.forward(layer, draft_pass, gather=False).values())
        return after_the_pass + (work.drafts - 1) * after_a_draft

    def _products(self, stage: Stage, work: Microbatch) -> tuple[float, float]:
        """Matrix products of the layers, as (bound by arithmetic, bound by weights)."""
        facts = self.facts
        moe = self.facts.moe
        sparse = sum(layer in facts.sparse_layers for layer in stage.layer_range)
        dense = sum(facts.layer_parameters(layer) for layer in stage.layer_range)
        total = [0.0, 0.0]

        def add(parameters: float, tokens: float) -> None:
            arithmetic = 2.0 * parameters * tokens / stage.t / self._flops
            traffic = parameters * facts.weight_bytes / stage.t / self._bandwidth
            total[traffic > arithmetic] += roofline(arithmetic, traffic, self.efficiency.sharpness)

        if moe is not None and sparse:
            dense -= sparse * moe.experts * moe.expert_parameters
            touched = moe.touched(work.tokens)
            tokens_an_expert = work.tokens * moe.chosen / touched  # tokens that meet one expert
            add(sparse * touched * moe.expert_parameters, tokens_an_expert)
        add(dense, work.tokens)
        return total[0], total[1]

    def _overhead(self, stage: Stage, products: float) -> float:
        """Seconds of layers besides their ``products``. The kernels of sparse layers and of latent
        attention hide behind these at large batches."""
        sparse = sum(layer in self.facts.sparse_layers for layer in stage.layer_range)
        latent = stage.layers if self.facts.attention.kind == "mla" else 0
        least = sparse * self.efficiency.moe_us + latent * self.efficiency.mla_us
        hidden = roofline(least * _MICRO, products, self.efficiency.sharpness) - products
        return stage.layers * self._layer_us * _MICRO + hidden

    def _attention(self, stage: Stage, work: Microbatch) -> float:
        attention = self.facts.attention
        reached = self.efficiency.cpu_attention if self._on_cpus else 1.0
        read = work.batch * work.context * kv_bytes(self.facts, stage, self.kv_element_bytes)
        heads = stage.layers / min(stage.t, attention.heads)
        peak = self.cluster.device.flops(16) * self.efficiency.compute * reached
        decode = roofline(
            work.rows * (_flops_per_context(attention, decode=True) * work.context) * heads / peak,
            read / (self._bandwidth * reached),
            self.efficiency.sharpness,
        )
        prompts = max(0.0, work.tokens - work.rows)
        prefill = _flops_per_context(attention, decode=False) * work.prompt_context
        return decode + prompts * prefill * heads / peak

    def _all_reduce(self, stage: Stage, work: Microbatch) -> float:
        count = 2 * stage.layers + int(stage.is_first)  # the embedding is split by vocabulary
        size = work.tokens * self.facts.hidden * self.facts.activation_bytes
        return count * all_reduce_seconds(self.cluster, stage, size)

    def _logits(self, stage: Stage, work: Microbatch, *, gather: bool) -> float:
        facts = self.facts
        parameters = facts.embedding_parameters * stage.projection / stage.t
        peak = self.cluster.device.flops(16) * self.efficiency.compute
        seconds = roofline(
            2.0 * parameters * work.rows / peak,
            parameters * facts.activation_bytes / self._bandwidth,
            self.efficiency.sharpness,
        )
        if gather:
            size = work.rows * facts.vocabulary * facts.activation_bytes
            seconds += all_reduce_seconds(self.cluster, stage, size) / 2  # an all-gather is half
        return seconds

    def preparation(self, engine: Engine, stage: Stage, work: Microbatch) -> float:
        """CPU time to make the inputs of one microbatch."""
        sequence_us = engine.preparation_sequence_us + (
            engine.readd_us if stage.stages > 1 else 0.0
        )
        return (engine.preparation_us + sequence_us * work.batch) * _MICRO

    def transfer(self, engine: Engine, stage: Stage, _work: Microbatch) -> float:
        """Time a stage loses on a hand-over beyond moving the bytes, which :meth:`hop` has."""
        return engine.transfer_us * _MICRO if stage.stages > 1 else 0.0

    def hop(self, stage: Stage, work: Microbatch) -> float:
        """Moving hidden states and residual to the next stage: two tensors of [tokens, hidden]."""
        size = 2 * work.tokens * self.facts.hidden * self.facts.activation_bytes
        return hop_seconds(self.cluster, stage, size)

    def device_sampling(self, work: Microbatch) -> float:
        """Time of vLLM's sampler on the last stage's device."""
        logits = work.rows * self.facts.vocabulary
        device = self.cluster.device
        if device.kind == "cpu":
            return logits * self.sampling.vllm_core_ns * _NANO / max(1, device.cores)
        return logits * self.sampling.device_bytes / self._bandwidth

    def logits_copy(self, stage: Stage, work: Microbatch) -> float:
        """Bringing logits to the host's memory: each rank writes its float32 shard over its link."""
        link = self.cluster.device.host_link
        size = 4.0 * work.rows * self.facts.vocabulary * stage.projection / stage.t
        return link.hop_us * _MICRO + size / link.bytes_per_second

    def host_sampling(self, work: Microbatch, samplers: int) -> float:
        """``samplers`` cores draw: whole sequences per core, and never faster than the host's memory."""
        vocabulary = self.facts.vocabulary
        sampling = self.sampling
        rounds = math.ceil(work.rows / samplers)
        kernel = rounds * vocabulary * sampling.core_ns * _NANO
        traffic = work.rows * vocabulary * sampling.host_bytes / (sampling.host_gbs * 1e9)
        return max(kernel, traffic)

    def schedule(self, engine: Engine, work: Microbatch) -> float:
        """Scheduler, messages and update of one iteration."""
        return (engine.schedule_us + engine.schedule_sequence_us * work.batch) * _MICRO

    def front_end_time(self, work: Microbatch) -> float:
        """CPU time of the API server for the tokens of one iteration, each streamed by itself."""
        return work.batch * (self.front_end.token_us + self.front_end.chunk_us) * _MICRO

    def shared_cores(self) -> tuple[int, int]:
        """Where devices are CPUs, and so compete with samplers, scheduler and API server: the cores of
        all hosts, and those of one device. (0, 0) for accelerators."""
        if not self._on_cpus:
            return 0, 0
        return self.cluster.cores_per_host * self.cluster.hosts, max(1, self.cluster.device.cores)


def datasheet_costs(
    facts: ModelFacts,
    cluster: Cluster,
    workload: Workload,
    given: Mapping[str, float] | None = None,
) -> DatasheetCosts:
    """The data sheets' costs of ``workload``; ``given`` are assumed inputs by name. Raises
    ConfigError: ``workload.sampling`` is unknown."""
    assumed = Assumed(given=given or {})
    return DatasheetCosts(
        facts=facts,
        cluster=cluster,
        efficiency=hardware.efficiency(assumed),
        sampling=hardware.sampling(workload.sampling, assumed),
        front_end=hardware.front_end(assumed),
        kv_element_bytes=workload.kv_element_bytes or float(facts.activation_bytes),
    )


def all_reduce_seconds(cluster: Cluster, stage: Stage, size: float) -> float:
    """One all-reduce of ``size`` bytes among the ranks of a stage; 0 for one rank. All rings share a
    host's adapters, which so carry the volume that a single device of the ring carries."""
    ranks = stage.t
    hosts = stage.hosts
    link = cluster.device.link
    network = cluster.network
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    inside = link.step_us * _MICRO * math.log2(max(1.0, ranks / hosts))
    in_link = moved / link.bytes_per_second
    if hosts == 1:
        small = (
            link.small_us * _MICRO + moved / (link.small_gbs * 1e9) if link.small_us else math.inf
        )
        return min(inside + in_link, small)
    rings = (network.step_us, network.efficiency), (network.small_step_us, network.small_efficiency)
    return inside + min(
        step_us * _MICRO * math.log2(hosts)
        + max(in_link, moved / (network.peak_bytes_per_second * efficiency))
        for step_us, efficiency in rings
    )


def hop_seconds(cluster: Cluster, stage: Stage, size: float) -> float:
    """``size`` bytes of hidden states from ``stage`` to the next one: each rank sends its 1/t share;
    that the receivers gather the rest on their own link, at least as fast, is left out."""
    if stage.is_last:
        return 0.0
    if stage.crosses:
        network = cluster.network
        rate = network.peak_bytes_per_second * network.efficiency
        return network.hop_us * _MICRO + size / rate
    link = cluster.device.link
    return link.hop_us * _MICRO + size / stage.t / link.bytes_per_second


def volume_per_device(layers: int, hidden: int, tokens: float, p: int, t: int) -> float:
    """Elements that one device sends while ``tokens`` tokens pass the pipeline, on average: two
    all-reduces a layer move ``2 (t - 1) / t`` of their message each."""
    return tokens * hidden * (4 * layers * (t - 1) / (p * t) + (p - 1) / p)
