"""Where the ranks of a pipeline sit: which layers, which hosts, which hops cross the network; and what
a device of each stage has to hold, and leaves for the KV cache.

Rank ``i * t + r`` is tensor-parallel rank ``r`` of stage ``i``; hosts are filled in rank order, as
vLLM does. So a stage lies inside one host whenever ``t`` divides the devices of a host.
"""

import dataclasses

from sipipe.engine.layers.cut import layer_split
from sipipe.engine.layers.facts import ModelFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    index: int
    stages: int
    layer_range: range
    t: int
    hosts: int
    """Hosts that its ``t`` ranks lie on."""
    crosses: bool
    """True where the hop to the next stage leaves the host."""
    projection: float
    """Share of the output projection's columns that it multiplies by."""
    head_layers: int = 0
    """Layers of a draft head that it holds besides its own."""

    @property
    def layers(self) -> int:
        return len(self.layer_range)

    @property
    def is_first(self) -> bool:
        """Holds the input embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds the output projection as it was loaded."""
        return self.index == self.stages - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    p: int
    t: int
    stages: tuple[Stage, ...]

    @property
    def shares_projection(self) -> bool:
        """True where the output projection is shared out over the stages."""
        return self.stages[-1].projection < 1.0

    @property
    def crossings(self) -> int:
        """Hops that leave a host, of ``p - 1``."""
        return sum(stage.crosses for stage in self.stages)


def place(
    layers: int,
    p: int,
    t: int,
    devices_per_host: int,
    cut: tuple[int, ...] | None = None,
    projections: tuple[float, ...] = (),
    head_layers: int = 0,
) -> Placement:
    """The placement of ``p`` stages of ``t`` ranks. Requires ``1 <= p <= layers``.

    Args:
        cut: layers of each stage; None takes vLLM's even cut.
        projections: each stage's part of the output projection; empty: the last stage has it.
        head_layers: layers of a draft head on the last stage.
    """
    assert 1 <= p <= layers
    assert t >= 1
    stages = list[Stage]()
    first = 0
    for index, count in enumerate(cut or layer_split(layers, p)):
        begin, end = (rank // devices_per_host for rank in (index * t, (index + 1) * t - 1))
        stages.append(
            Stage(
                index=index,
                stages=p,
                layer_range=range(first, first + count),
                t=t,
                hosts=end - begin + 1,
                crosses=index < p - 1 and (index + 1) * t // devices_per_host != begin,
                projection=projections[index] if projections else float(index == p - 1),
                head_layers=head_layers if index == p - 1 else 0,
            )
        )
        first += count
    return Placement(p=p, t=t, stages=tuple(stages))


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The tightest stage of a placement. All sizes per device, in bytes."""

    stage: int
    weights: float
    workspace: float
    available: float
    """Device memory, of GPUs times the utilization asked for."""
    kv_tokens: int
    """Tokens the KV cache of the whole deployment holds; negative where weights do not fit."""

    @property
    def short(self) -> float:
        """Bytes missing per device before a single token is cached; 0 where all fits."""
        return max(0.0, self.weights + self.workspace - self.available)


def weight_bytes(facts: ModelFacts, stage: Stage) -> float:
    """Weights on one device of ``stage``. A head's layers are like the model's last, and it has the
    model's embedding and output projection, as most published heads do."""
    layers = sum(facts.layer_parameters(layer) for layer in stage.layer_range)
    layers += stage.head_layers * facts.layer_parameters(facts.layers - 1)
    ends: float = int(stage.is_first) + int(stage.is_last)
    if facts.tied_embeddings:
        ends = min(1, ends)
    if stage.projection != stage.is_last:  # shared out: each part is a copy
        ends += stage.projection
    embeddings = ends * facts.embedding_parameters * facts.activation_bytes
    return (layers * facts.weight_bytes + embeddings) / stage.t


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float | None = None) -> float:
    """KV cache of one token over all layers, without copies, in bytes."""
    size = facts.activation_bytes if element_bytes is None else element_bytes
    return facts.layers * facts.attention.kv_elements * size


def kv_bytes(facts: ModelFacts, stage: Stage, element_bytes: float) -> float:
    """KV cache of one token on one device of ``stage``. Ranks split it by KV head, and copy beyond
    that: the latent of MLA is one head."""
    elements = (stage.layers + stage.head_layers) * facts.attention.kv_elements
    return elements * element_bytes / min(stage.t, facts.attention.kv_heads)
