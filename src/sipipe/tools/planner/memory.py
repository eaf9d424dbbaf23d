"""What a device of each stage has to hold, and what that leaves for the KV cache."""

from __future__ import annotations

import dataclasses

from sipipe.engine.layers.facts import Attention, ModelFacts
from sipipe.tools.planner.hardware import Cluster, Efficiency
from sipipe.tools.planner.placement import Placement, Stage

__all__ = ["Memory", "kv_bytes", "kv_bytes_per_token", "kv_shards", "memory_of", "weight_bytes"]

_GIB = float(1 << 30)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The tightest stage of a placement. All sizes per device, in bytes."""

    stage: int
    weights: float
    workspace: float
    available: float
    """Device memory times the utilization asked for."""
    kv_tokens: int
    """Tokens the KV cache of the whole deployment holds; negative where weights do not fit."""

    @property
    def short(self) -> float:
        """Bytes missing per device before a single token is cached; 0 where all fits."""
        return max(0.0, self.weights + self.workspace - self.available)


def weight_bytes(facts: ModelFacts, stage: Stage) -> float:
    """Weights on one device of ``stage``."""
    layers = sum(facts.layer_parameters(layer) for layer in stage.layer_range)
    total = layers * facts.weight_bytes
    ends = int(stage.is_first) + int(stage.is_last)
    if facts.tied_embeddings:
        ends = min(1, ends)
    return (total + ends * facts.embedding_parameters * facts.activation_bytes) / stage.t


def kv_elements(attention: Attention) -> int:
    """Elements that one token keeps in one layer's cache, over all ranks and without copies."""
    if attention.kind == "mla":
        return attention.kv_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim


def kv_shards(attention: Attention, t: int) -> int:
    """Into how many different parts ``t`` ranks split the cache of one token.

    Grouped-query attention splits by KV head and copies beyond that; the latent of MLA has no
    heads, so every rank keeps all of it.
    """
    return 1 if attention.kind == "mla" else min(t, attention.kv_heads)


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float | None = None) -> float:
    """KV cache of one token over all layers, without copies, in bytes."""
    size = facts.activation_bytes if element_bytes is None else element_bytes
    return facts.layers * kv_elements(facts.attention) * size


def kv_bytes(facts: ModelFacts, stage: Stage, element_bytes: float) -> float:
    """KV cache of one token on one device of ``stage``."""
    elements = stage.layers * kv_elements(facts.attention)
    return elements * element_bytes / kv_shards(facts.attention, stage.t)


def memory_of(
    facts: ModelFacts,
    placement: Placement,
    *,
    cluster: Cluster,
    efficiency: Efficiency,
    utilization: float,
    kv_element_bytes: float,
) -> Memory:
    """The stage whose cache holds the fewest tokens: every token needs all stages."""
    available = cluster.device.memory_bytes * utilization
    workspace = efficiency.workspace_gib * _GIB if cluster.device.kind == "gpu" else 0.0
    stages = []
    for stage in placement.stages:
        weights = weight_bytes(facts, stage)
        free = available - weights - workspace
        stages.append(
            Memory(
                stage=stage.index,
                weights=weights,
                workspace=workspace,
                available=available,
                kv_tokens=int(free // kv_bytes(facts, stage, kv_element_bytes)),
            )
        )
    return min(stages, key=lambda memory: (memory.kv_tokens, -memory.weights))
