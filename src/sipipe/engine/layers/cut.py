"""Layers per stage so that no stage waits for the one with the output projection.

vLLM cuts the layers evenly (:func:`layer_split`). For a small model with a large vocabulary the
projection on the last stage is worth many layers: the paper's load imbalance, before any sampling.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from sipipe.engine.layers.bonds import boundaries
from sipipe.engine.layers.facts import ModelFacts

Device = Literal["cpu", "gpu"]
Cut = tuple[int, ...]
"""Layers of each stage."""

_FIXED_BYTES = {"cpu": 5e6, "gpu": 100e6}
"""Bytes of weights whose product takes as long as the rest of a layer (attention, norms, launches).
CPU: 32 sequences of the benchmark model on one core take 1.01 ms a layer of 6.3 MB and 14.7 ms the
projection of 156 MB. GPU: the planner's 40 us a layer at 2.5 TB/s, not measured."""
_DECODE_SHARE = 0.5
"""Part of the tokens that meet the projection: prompts meet the layers only, and are assumed to
have as many tokens as the outputs. With none of them the last stage would get fewer layers."""
COST_TOKENS = 32
"""Tokens of the microbatch that costs are of: how many experts of a layer are met."""
WORTH_SHARING = 1.03
"""How many times as long the slowest stage has to be otherwise for ``"vocabulary": "auto"`` to
share the output projection out."""
EVEN = 1.15
"""How many times as quick or slow as the last stage's a device has to be for its columns to be
computed with its own speed: equal ones differ less where nothing disturbs them."""
_WORTH_IT = 0.05
"""Part of the slowest stage's time below which the even cut is kept, for its room for KV cache."""


def cut_layers(
    facts: ModelFacts,
    p: int,
    t: int = 1,
    *,
    device: Device = "gpu",
    kv_loss: float = 1.0,
    memory: float = math.inf,
) -> Cut:
    """Layers of ``p`` stages of ``t`` ranks, for the shortest slowest stage. vLLM's even cut where
    that is not at least 5 % shorter, or every better one costs more than ``kv_loss`` of its KV
    cache's tokens; ``memory`` as :func:`kv_lost` has it. Layers that have to be on one stage stay together; the
    even cut is then the one nearest to it. Requires ``1 <= p <= most_stages(facts)``."""
    costs, projection = _costs(facts, t, device)
    allowed = boundaries(facts.bonds, facts.layers)
    even = nearest_even(facts.layers, p, allowed)
    least = (1 - kv_loss) * _tokens(facts, even, t, memory)
    most = facts.layers
    while most > max(even):
        best = _shortest(costs, projection, p, most, allowed)
        if not best:
            break
        if _tokens(facts, best, t, memory) >= least:
            pays = speed_up(facts, even, best, t, device=device) * (1 - _WORTH_IT) > 1
            return best if pays else even
        most = max(best) - 1
    return even


def kv_lost(facts: ModelFacts, layers: Cut, t: int = 1, memory: float = math.inf) -> float:
    """Part of the tokens of an even cut's KV cache that ``layers`` leave no room for. ``memory``:
    bytes of a rank for weights and cache; without a bound all stages have as many, as on CPUs."""
    even = _tokens(facts, layer_split(facts.layers, len(layers)), t, memory)
    return 1 - _tokens(facts, layers, t, memory) / even if even > 0 else 0.0


def speed_up(
    facts: ModelFacts, before: Cut, after: Cut, t: int = 1, *, device: Device = "gpu"
) -> float:
    """How many times as long the slowest stage is with layers ``before`` as with ``after``."""
    costs, projection = _costs(facts, t, device)
    return _slowest(costs, projection, before) / _slowest(costs, projection, after)


def _slowest(costs: list[float], projection: float, layers: Cut) -> float:
    times = _stage_costs(costs, layers)
    return max(*times, times[-1] + projection)


def _tokens(facts: ModelFacts, layers: Cut, t: int, memory: float) -> float:
    """Of the stage whose cache holds the fewest, in any unit; 0 where its weights do not fit."""
    if memory == math.inf:
        return 1 / max(layers)
    sizes = [float(facts.layer_parameters(n)) * facts.weight_bytes for n in range(facts.layers)]
    weights = _stage_costs(sizes, layers)
    for stage in {0, len(layers) - 1}:
        weights[stage] += facts.embedding_parameters * facts.activation_bytes
    left = zip(layers, weights, strict=True)
    each = [(memory - size / t) / count for count, size in left if count]
    return max(0.0, min(each))


def share_projection(
    facts: ModelFacts, cut: Cut, even: Cut, t: int = 1, *, device: Device = "cpu"
) -> tuple[tuple[float, ...], float]:
    """What part of the output projection each stage with ``even`` layers multiplies by, for the
    shortest slowest one, and how many times as long that is with ``cut`` and all on the last."""
    costs, projection = _costs(facts, t, device)
    parts, slowest = fill(_stage_costs(costs, even), [projection] * len(even))
    return parts, _slowest(costs, projection, cut) / slowest


def layers_work(facts: ModelFacts, layers: Cut, t: int, device: Device) -> tuple[float, ...]:
    """What each stage's ``layers`` cost a rank, in any unit."""
    return tuple(_stage_costs(_costs(facts, t, device)[0], layers))


def projection_times(
    work: Sequence[float], times: Sequence[float], projection: float
) -> tuple[float, ...]:
    """How long each stage would take for all of the output projection. Measured is the last one's;
    another is as much quicker or slower as with its layers, which take ``times`` and cost ``work``."""
    rates = [time / cost for time, cost in zip(times, work, strict=True)]
    slower = [rate / rates[-1] for rate in rates]
    return tuple(projection * (1.0 if 1 / EVEN <= by <= EVEN else by) for by in slower)


def fill(times: Sequence[float], projections: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """What part of the output projection each stage gets beside its layers' ``times``, where all of
    it takes one of ``projections`` there, and the time of the slowest then: filled up like water, so
    that a stage that is longer than the level has nothing."""
    level, water, width = math.inf, 1.0, 0.0
    for time, projection in sorted(zip(times, projections, strict=True)):
        water += time / projection
        width += 1 / projection
        level = min(level, water / width)
    parts = (max(0.0, level - time) / all_ for time, all_ in zip(times, projections, strict=True))
    return tuple(parts), max(*times, level)


def _costs(facts: ModelFacts, t: int, device: Device) -> tuple[list[float], float]:
    """What each layer and the projection cost a rank, in bytes of weights."""
    layers = range(facts.layers)
    costs = [_layer_bytes(facts, layer) / t + _FIXED_BYTES[device] for layer in layers]
    return costs, facts.embedding_parameters * facts.activation_bytes / t * _DECODE_SHARE


def _stage_costs(costs: list[float], layers: Cut) -> list[float]:
    ends = itertools.accumulate(layers)
    return [sum(costs[end - count : end]) for end, count in zip(ends, layers, strict=True)]


def _layer_bytes(facts: ModelFacts, layer: int) -> float:
    """Weights that a microbatch of 32 tokens meets in a layer."""
    parameters = float(facts.layer_parameters(layer))
    if layer in facts.sparse_layers and facts.moe is not None:
        moe = facts.moe
        parameters -= (moe.experts - moe.touched(COST_TOKENS)) * moe.expert_parameters
    return parameters * facts.weight_bytes


def _shortest(
    costs: list[float], projection: float, p: int, most: int, starts: Sequence[int]
) -> Cut:
    """The cut for the shortest slowest stage, of ``most`` at most; of equal ones the most even. Empty
    where none has so few layers in each stage."""
    total, allowed = len(costs), frozenset(starts)
    before = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(first: int, stages: int) -> tuple[float, int, Cut]:
        """(slowest stage, sum of squares, layers) of the ``stages`` last stages, from ``first``."""
        if stages == 1:
            count = total - first
            if count > most:
                return math.inf, 0, ()
            return before[total] - before[first] + projection, count**2, (count,)
        options: list[tuple[float, int, Cut]] = [(math.inf, 0, ())]
        for count in range(1, min(most, total - first - stages + 1) + 1):
            if first + count not in allowed:
                continue
            slowest, squares, rest = best(first + count, stages - 1)
            if not rest:
                continue
            own = before[first + count] - before[first]
            options.append((max(own, slowest), squares + count**2, (count, *rest)))
        return min(options)

    return best(0, p)[2]


def most_stages(facts: ModelFacts) -> int:
    """Stages that the model can be cut into at most."""
    return 1 + len(boundaries(facts.bonds, facts.layers))


def nearest_even(layers: int, p: int, starts: Sequence[int]) -> Cut:
    """vLLM's even cut, where every stage may begin at its layer; else the cut by ``starts`` whose
    largest stage is smallest, the most even one of those. Requires p - 1 of ``starts`` at least."""
    even = layer_split(layers, p)
    if set(itertools.accumulate(even[:-1])) <= set(starts):
        return even
    return _shortest([1.0] * layers, 0.0, p, layers, starts)


def layer_split(layers: int, p: int) -> Cut:
    """Layers per stage: as even as possible, the last stage (which also has the output
    projection) never among those with one more, as vLLM splits."""
    base, rest = divmod(layers, p)
    return tuple(base + (p - 1 - rest <= index < p - 1) for index in range(p))
