"""Layers per stage so that no stage waits for the one with the output projection.

vLLM cuts the layers evenly (:func:`layer_split`). The last stage then has
the projection on the vocabulary on top, which for a small model with a large vocabulary is worth
many layers, and every other stage waits for it: the paper's load imbalance, before any sampling.
"""

import functools
import itertools
from typing import Literal

from sipipe.engine.layers.facts import ModelFacts

_FIXED_BYTES = {"cpu": 5e6, "gpu": 100e6}
"""Bytes of weights whose product takes as long as what a layer costs besides its weights
(attention, norms, launches). CPU: 32 sequences of the benchmark model on one core take 1.01 ms a
layer of 6.3 MB and 14.7 ms the projection of 156 MB. GPU: 40 us a layer at 2.5 TB/s, as the planner
assumes; not measured."""
_DECODE_SHARE = 0.5
"""Part of the tokens that meet the projection: prompts meet the layers only, and are assumed to
have as many tokens as the outputs. With none of them the last stage would get fewer layers."""
_TOKENS = 32
"""Tokens of the microbatch that says how many experts of a layer are met."""
_WORTH_IT = 0.05
"""Part of the slowest stage's time below which the even cut, which leaves most room for the KV
cache, is kept."""


def cut_layers(
    facts: ModelFacts, p: int, t: int = 1, *, device: Literal["cpu", "gpu"] = "gpu"
) -> tuple[int, ...]:
    """Layers of each of ``p`` stages of ``t`` ranks, for the shortest slowest stage.

    vLLM's even cut where that is not at least 5 % shorter: the more layers a stage has, the
    fewer tokens fit in its KV cache. Requires ``1 <= p <= facts.layers``.
    """
    costs, projection = _costs(facts, t, device)

    def slowest(layers: tuple[int, ...]) -> float:
        times = _stage_costs(costs, layers)
        return max(*times, times[-1] + projection)

    even = layer_split(facts.layers, p)
    best = _shortest(costs, projection, p)
    return best if slowest(best) < slowest(even) * (1 - _WORTH_IT) else even


def share_projection(
    facts: ModelFacts, cut: tuple[int, ...], even: tuple[int, ...], t: int = 1
) -> tuple[tuple[float, ...], float]:
    """The output projection of stages on CPUs with ``even`` layers, shared out over all of them.

    Returns what part of the vocabulary each stage multiplies by, so that the slowest stage is as
    short as can be, and how many times as long the slowest is with layers ``cut`` and all of the
    projection on the last stage.
    """
    costs, projection = _costs(facts, t, "cpu")
    times = _stage_costs(costs, even)
    # Filled up like water: a stage that is longer than the level has nothing of it.
    filled = itertools.accumulate(sorted(times))
    level = min((below + projection) / n for n, below in enumerate(filled, 1))
    parts = tuple(max(0.0, level - time) / projection for time in times)
    before = _stage_costs(costs, cut)
    return parts, max(*before, before[-1] + projection) / max(*times, level)


def _costs(facts: ModelFacts, t: int, device: Literal["cpu", "gpu"]) -> tuple[list[float], float]:
    """What each layer and the projection cost a rank, in bytes of weights."""
    layers = range(facts.layers)
    costs = [_layer_bytes(facts, layer) / t + _FIXED_BYTES[device] for layer in layers]
    return costs, facts.embedding_parameters * facts.activation_bytes / t * _DECODE_SHARE


def _stage_costs(costs: list[float], layers: tuple[int, ...]) -> list[float]:
    ends = itertools.accumulate(layers)
    return [sum(costs[end - count : end]) for end, count in zip(ends, layers, strict=True)]


def _layer_bytes(facts: ModelFacts, layer: int) -> float:
    """Weights that a microbatch of 32 tokens meets in a layer."""
    parameters = float(facts.layer_parameters(layer))
    if layer in facts.sparse_layers and facts.moe is not None:
        moe = facts.moe
        parameters -= (moe.experts - moe.touched(_TOKENS)) * moe.expert_parameters
    return parameters * facts.weight_bytes


def _shortest(costs: list[float], projection: float, p: int) -> tuple[int, ...]:
    """The cut with the shortest slowest stage; of equal ones the most even."""
    total = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @functools.cache
    def best(first: int, stages: int) -> tuple[float, int, tuple[int, ...]]:
        """(slowest stage, sum of squares, layers) of the ``stages`` last stages, from ``first``."""
        if stages == 1:
            count = total - first
            return before[total] - before[first] + projection, count**2, (count,)
        options = []
        for count in range(1, total - first - stages + 2):
            slowest, squares, rest = best(first + count, stages - 1)
            own = before[first + count] - before[first]
            options.append((max(own, slowest), squares + count**2, (count, *rest)))
        return min(options)

    return best(0, p)[2]


def layer_split(layers: int, p: int) -> tuple[int, ...]:
    """Layers per stage: as even as possible, the last stage (which also has the output
    projection) never among those with one more, as vLLM splits."""
    base, rest = divmod(layers, p)
    return tuple(base + (p - 1 - rest <= index < p - 1) for index in range(p))
