"""Where the ranks of a pipeline sit: which layers, which hosts, which hops cross the network.

Rank ``i * t + r`` is tensor-parallel rank ``r`` of stage ``i``; hosts are filled in rank order, as
vLLM does. So a stage lies inside one host whenever ``t`` divides the devices of a host.
"""

from __future__ import annotations

import dataclasses

from sipipe.engine.layers.cut import layer_split

__all__ = ["Placement", "Stage", "place"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage."""

    index: int
    stages: int
    first_layer: int
    layers: int
    t: int
    hosts: int
    """Hosts that its ``t`` ranks lie on."""
    crosses: bool
    """Whether the hop to the next stage leaves the host."""

    @property
    def is_first(self) -> bool:
        """Holds the input embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds the output projection."""
        return self.index == self.stages - 1

    @property
    def layer_range(self) -> range:
        """Indices of its layers."""
        return range(self.first_layer, self.first_layer + self.layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A pipeline over hosts."""

    p: int
    t: int
    stages: tuple[Stage, ...]

    @property
    def crossings(self) -> int:
        """Hops that leave a host, of ``p - 1``."""
        return sum(stage.crosses for stage in self.stages)


def place(
    layers: int, p: int, t: int, devices_per_host: int, cut: tuple[int, ...] | None = None
) -> Placement:
    """The placement of ``p`` stages of ``t`` ranks. Requires ``1 <= p <= layers``.

    ``cut``: layers of each stage; None takes vLLM's even cut.
    """
    assert 1 <= p <= layers
    assert t >= 1
    stages = []
    first = 0
    for index, count in enumerate(cut or layer_split(layers, p)):
        ranks = range(index * t, (index + 1) * t)
        begin, end = ranks[0] // devices_per_host, ranks[-1] // devices_per_host
        following = (index + 1) * t // devices_per_host
        stages.append(
            Stage(
                index=index,
                stages=p,
                first_layer=first,
                layers=count,
                t=t,
                hosts=end - begin + 1,
                crosses=index < p - 1 and following != begin,
            )
        )
        first += count
    return Placement(p=p, t=t, stages=tuple(stages))
