"""What a device of each stage has to hold, and what that leaves for the KV cache."""

from __future__ import annotations

import dataclasses

from sipipe.engine.layers.facts import ModelFacts
from sipipe.tools.planner.hardware import Cluster, Efficiency
from sipipe.tools.planner.placement import Placement, Stage

__all__ = ["Memory", "kv_bytes", "memory_of", "weight_bytes"]

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


def kv_bytes(facts: ModelFacts, stage: Stage, element_bytes: float) -> float:
    """KV cache of one token on one device of ``stage``."""
    attention = facts.attention
    return stage.layers * attention.kv_elements * element_bytes / attention.kv_shards(stage.t)


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
        tokens = int(free // kv_bytes(facts, stage, kv_element_bytes))
        stages.append((tokens, -weights, stage.index))
    tokens, negative, index = min(stages)
    return Memory(
        stage=index,
        weights=-negative,
        workspace=workspace,
        available=available,
        kv_tokens=tokens,
    )
