"""Layers per stage, cut so that no stage waits for the one with the output projection.

vLLM cuts the layers evenly (:func:`layer_split`). For a small model with a large vocabulary the
projection on the last stage costs as much as many layers: the paper's load imbalance, before any
sampling.

Costs are counted in bytes of weights; what else a layer takes is added as such bytes. Throughout, ``t`` is the number of tensor-parallel ranks of a stage.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sipipe.engine.layers.bonds import boundaries
from sipipe.engine.layers.facts import ModelFacts

Device = Literal["cpu", "gpu"]
Cut = tuple[int, ...]
"""Numbers of layers of the stages, in order."""

_FIXED_BYTES = {"cpu": 5e6, "gpu": 100e6}
"""Bytes of weights whose product takes as long as the rest of a layer (attention, norms, launches).
CPU: 32 sequences of the benchmark model on one core take 1.01 ms a layer of 6.3 MB and 14.7 ms the
projection of 156 MB. GPU: the planner's 40 us a layer at 2.5 TB/s, not measured."""
_DECODE_SHARE = 0.5
"""Part of the tokens that the projection is computed for. It is not for those of prompts, which are
assumed to be as many as the outputs'. Without prompts the last stage would get fewer layers."""
COST_TOKENS = 32
"""Tokens of the microbatch that costs are estimated for. They decide how many experts are read."""
WORTH_SHARING = 1.03
"""Least gain for which ``"vocabulary": "auto"`` shares the output projection out: the slowest stage's
time without sharing, as a multiple of its time with sharing."""
EVEN = 1.15
"""Ratio of two devices' times up to which they are taken for equally fast. Equal devices differ by less
where nothing disturbs them."""
_WORTH_IT = 0.05
"""Least gain, as a part of the slowest stage's time, for which the even cut is left. The even cut has
the most room for KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Maker of drafts on the last stage, behind the model's layers."""

    drafts: int = 0
    """Drafts of each request in a pass, at most; 0: nobody makes any."""
    model: ModelFacts | None = None
    """Sizes of the model that makes them; None: a head does, which is one layer like the target's last."""

    def kept_layers(self, facts: ModelFacts) -> float:
        """Its KV cache, in layers of the target, of which ``facts`` are the sizes."""
        if not self.drafts:
            return 0.0
        if self.model is None:
            return 1.0
        elements = self.model.layers * self.model.attention.kv_elements
        return elements / facts.attention.kv_elements

    def weights(self, facts: ModelFacts) -> float:
        """Bytes of its weights. A head has the target's embedding and output projection."""
        if not self.drafts:
            return 0.0
        if self.model is None:
            return facts.layer_parameters(facts.layers - 1) * facts.weight_bytes
        layers = sum(map(self.model.layer_parameters, range(self.model.layers)))
        ends = 1 if self.model.tied_embeddings else 2
        return (
            layers * self.model.weight_bytes
            + ends * self.model.embedding_parameters * self.model.activation_bytes
        )


NO_DRAFTING = Drafting()


def cut_layers(
    facts: ModelFacts,
    p: int,
    t: int = 1,
    *,
    device: Device = "gpu",
    kv_loss: float = 1.0,
    memory: float = math.inf,
    drafting: Drafting = NO_DRAFTING,
) -> Cut:
    """Cut the layers so that the slowest stage is as quick as possible. The even cut stays where that
    is not at least 5 % quicker. Layers that have to be on one stage stay together; the even cut is then
    the one nearest to vLLM's.

    Args:
        facts: the model's sizes.
        p: stages, from 1 to ``most_stages(facts)``.
        t: tensor-parallel ranks of a stage.
        device: the kind of device, which decides what a layer costs beside its weights.
        kv_loss: part of the tokens of the even cut's KV cache that the cut may cost, at most.
        memory: bytes of a rank for weights and KV cache, as :func:`kv_lost` takes them.
        drafting: who makes drafts on the last stage. Where no cut that counts their time pays, the cut is
            the one without: with many requests few drafts are made.
    """
    even = nearest_even(facts.layers, p, boundaries(facts.bonds, facts.layers))
    equal = [1.0] * p
    limits = _Limits(facts=facts, t=t, kv_loss=kv_loss, memory=memory, drafting=drafting)
    # Without drafts, its weights and KV cache are there all the same.
    for busy in dict.fromkeys((drafting, NO_DRAFTING)):
        costs, projection = _costs(facts, t, device, busy)
        best = _quickest(limits, costs, equal, projection)
        if pays(speed_up(facts, even, best, t, device=device, drafting=busy)):
            return best
    return even


def measured_cut(
    facts: ModelFacts,
    layers: Cut,
    seconds: Sequence[float],
    behind: float,
    t: int = 1,
    *,
    device: Device = "gpu",
    kv_loss: float = 1.0,
    memory: float = math.inf,
    drafting: Drafting = NO_DRAFTING,
) -> tuple[Cut, float]:
    """Cut the layers as it would have been best for what stages have worked on. A layer that moves takes
    as much longer or shorter as its new stage takes for its own.

    Args:
        facts: the model's sizes.
        layers: the layers that the stages have.
        seconds: seconds that each stage took for its layers, above 0.
        behind: seconds that the last stage took for what is behind them, such as the output projection.
        t, device, kv_loss, memory: as in :func:`cut_layers`.
        drafting: who makes drafts on the last stage; its time is in ``behind``.

    Returns the cut, which is ``layers`` where no other is quicker, and the time of the slowest stage with
    ``layers``, as a multiple of that with the cut.
    """
    costs, _ = _costs(facts, t, device)
    rates = [took / cost for took, cost in zip(seconds, _stage_costs(costs, layers), strict=True)]
    limits = _Limits(facts=facts, t=t, kv_loss=kv_loss, memory=memory, drafting=drafting)
    best = _quickest(limits, costs, rates, behind)
    before = _slowest(costs, rates, behind, layers)
    after = _slowest(costs, rates, behind, best)
    return (best, before / after) if after < before else (layers, 1.0)


def pays(quicker: float) -> bool:
    """Say if a cut whose slowest stage is ``quicker`` times as quick is worth taking."""
    return quicker * (1 - _WORTH_IT) > 1


def kv_lost(
    facts: ModelFacts,
    layers: Cut,
    t: int = 1,
    memory: float = math.inf,
    drafting: Drafting = NO_DRAFTING,
) -> float:
    """Part of the tokens of an even cut's KV cache for which ``layers`` leave no room. ``memory`` is the
    number of bytes of a rank for weights and cache. With an infinite one, as on CPUs, all stages'
    caches have as many bytes."""
    even = _tokens(facts, layer_split(facts.layers, len(layers)), t, memory, drafting)
    return 1 - _tokens(facts, layers, t, memory, drafting) / even if even > 0 else 0.0


def speed_up(
    facts: ModelFacts,
    before: Cut,
    after: Cut,
    t: int = 1,
    *,
    device: Device = "gpu",
    drafting: Drafting = NO_DRAFTING,
) -> float:
    """Time of the slowest stage with layers ``before``, as a multiple of that with ``after``;
    ``drafting`` as in :func:`cut_layers`."""
    costs, projection = _costs(facts, t, device, drafting)
    equal = [1.0] * len(before)
    slowest = _slowest(costs, equal, projection, before)
    return slowest / _slowest(costs, equal, projection, after)


def _slowest(costs: list[float], rates: Sequence[float], projection: float, layers: Cut) -> float:
    """The cost of the dearest stage, where a stage's layers cost ``rates`` times as much as ``costs`` says,
    and the last one has the projection."""
    stages = [rate * cost for rate, cost in zip(rates, _stage_costs(costs, layers), strict=True)]
    return max(*stages, stages[-1] + projection)


def _tokens(
    facts: ModelFacts, layers: Cut, t: int, memory: float, drafting: Drafting = NO_DRAFTING
) -> float:
    """Tokens of the stage whose KV cache holds the fewest, in any unit; 0 if its weights do not fit."""
    caches = [*layers[:-1], layers[-1] + drafting.kept_layers(facts)]
    if memory == math.inf:
        return 1 / max(caches)
    sizes = [float(facts.layer_parameters(n)) * facts.weight_bytes for n in range(facts.layers)]
    weights = _stage_costs(sizes, layers)
    for stage in {0, len(layers) - 1}:
        weights[stage] += facts.embedding_parameters * facts.activation_bytes
    weights[-1] += drafting.weights(facts)
    tokens = [
        (memory - size / t) / count for count, size in zip(caches, weights, strict=True) if count
    ]
    return max(0.0, min(tokens))


def share_projection(
    facts: ModelFacts, cut: Cut, even: Cut, t: int = 1, *, device: Device = "cpu"
) -> tuple[tuple[float, ...], float]:
    """Share the output projection out over stages with ``even`` layers so that the slowest is as quick
    as possible. Returns each stage's part, together 1, and the slowest stage's time with ``cut`` and
    the projection on the last stage, as a multiple of the time so."""
    costs, projection = _costs(facts, t, device)
    parts, slowest = fill(_stage_costs(costs, even), [projection] * len(even))
    return parts, _slowest(costs, [1.0] * len(cut), projection, cut) / slowest


def layers_work(facts: ModelFacts, layers: Cut, t: int, device: Device) -> tuple[float, ...]:
    """Costs of each stage's ``layers`` for a rank, in any unit."""
    costs, _ = _costs(facts, t, device)
    return tuple(_stage_costs(costs, layers))


def projection_times(
    work: Sequence[float], times: Sequence[float], projection: float
) -> tuple[float, ...]:
    """Times that each stage would take for all of the output projection, in the unit of ``projection``,
    which was measured on the last stage. Another stage is as much quicker or slower as it is with its
    layers, which take ``times`` and cost ``work``."""
    rates = [time / cost for time, cost in zip(times, work, strict=True)]
    ratios = [rate / rates[-1] for rate in rates]
    return tuple(projection * (1.0 if 1 / EVEN <= ratio <= EVEN else ratio) for ratio in ratios)


def fill(times: Sequence[float], projections: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Share the output projection out so that the slowest stage is as quick as possible.

    Stages are filled up like vessels with water: one whose layers take longer than the level gets
    nothing.

    Args:
        times: seconds of each stage's layers.
        projections: seconds that each stage would take for all of the projection.

    Returns each stage's part, together 1, and the seconds of the slowest stage.
    """
    level = math.inf
    water = 1.0  # the whole projection, and what the layers of the vessels so far stand for
    width = 0.0  # of the vessels so far: projections that they compute in a second
    for time, projection in sorted(zip(times, projections, strict=True)):
        water += time / projection
        width += 1 / projection
        level = min(level, water / width)
    parts = tuple(
        max(0.0, level - time) / projection
        for time, projection in zip(times, projections, strict=True)
    )
    return parts, max(*times, level)


def _costs(
    facts: ModelFacts, t: int, device: Device, drafting: Drafting = NO_DRAFTING
) -> tuple[list[float], float]:
    """Costs of each layer, and of what is behind the last one, for a rank, in bytes of weights. Behind it
    are the projection and, for each draft, the draft model or a head: one layer like the last, and the
    projection again.

    Not on CPUs. A row of drafts costs there nearly what another sequence does, so that drafts are seldom
    worth it but with a request or two, and the stages would be uneven for all others."""
    costs, projection = _model_costs(facts, t, device)
    drafts = drafting.drafts if device == "gpu" else 0
    step = costs[-1] + projection
    if drafting.model is not None:
        step = sum(*_model_costs(drafting.model, t, device))
    return costs, (projection + drafts * step) * _DECODE_SHARE


def _model_costs(facts: ModelFacts, t: int, device: Device) -> tuple[list[float], float]:
    """Costs of each layer of a model, and of its output projection, as those of :func:`_costs`."""
    layers = range(facts.layers)
    costs = [_layer_bytes(facts, layer) / t + _FIXED_BYTES[device] for layer in layers]
    return costs, facts.embedding_parameters * facts.activation_bytes / t


def _stage_costs(costs: list[float], layers: Cut) -> list[float]:
    """Sums of the layers' ``costs`` by stage."""
    ends = itertools.accumulate(layers)
    return [sum(costs[end - count : end]) for end, count in zip(ends, layers, strict=True)]


def _layer_bytes(facts: ModelFacts, layer: int) -> float:
    """Bytes of a layer's weights that a microbatch of ``COST_TOKENS`` reads: some experts are idle."""
    parameters = float(facts.layer_parameters(layer))
    if layer in facts.sparse_layers and facts.moe is not None:
        moe = facts.moe
        parameters -= (moe.experts - moe.touched(COST_TOKENS)) * moe.expert_parameters
    return parameters * facts.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Limits of a cut, by the room that it leaves; fields as in :func:`cut_layers`."""

    facts: ModelFacts
    t: int
    kv_loss: float
    memory: float
    drafting: Drafting

    def tokens(self, layers: Cut) -> float:
        """Return what :func:`_tokens` does."""
        return _tokens(self.facts, layers, self.t, self.memory, self.drafting)


def _quickest(
    limits: _Limits, costs: list[float], rates: Sequence[float], projection: float
) -> Cut:
    """The cut whose slowest stage is the quickest, of those that cost at most ``kv_loss`` of the even cut's
    KV cache; the even one where there is none. ``rates`` as in :func:`_slowest`."""
    facts = limits.facts
    starts = boundaries(facts.bonds, facts.layers)
    even = nearest_even(facts.layers, len(rates), starts)
    least = (1 - limits.kv_loss) * limits.tokens(even)
    most = facts.layers
    while most > max(even):
        best = _shortest(costs, rates, projection, most, starts)
        if not best:
            break
        if limits.tokens(best) >= least:
            return best
        # It costs too much of the KV cache. The stage with the most layers has the fewest tokens.
        most = max(best) - 1
    return even


def _shortest(
    costs: list[float],
    rates: Sequence[float],
    projection: float,
    most: int,
    starts: Sequence[int],
) -> Cut:
    """The cut into stages of at most ``most`` layers, one for each of ``rates``, whose slowest stage is the
    quickest; of equal ones the most even. Empty where the layers do not fit so few a stage.

    By dynamic programming: the best cut of the layers from ``first`` on depends on nothing before."""
    p = len(rates)
    total = len(costs)
    allowed = frozenset(starts)
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(first: int, stages: int) -> tuple[float, int, Cut]:
        """Cost of the slowest, sum of squares, and layers of the last ``stages``, from ``first`` on. A
        smaller sum of squares is a more even cut."""
        if stages == 1:
            count = total - first
            if count > most:
                return math.inf, 0, ()
            return (sums[total] - sums[first]) * rates[-1] + projection, count**2, (count,)
        options: list[tuple[float, int, Cut]] = [(math.inf, 0, ())]
        for count in range(1, min(most, total - first - stages + 1) + 1):
            if first + count not in allowed:
                continue
            slowest, squares, following = best(first + count, stages - 1)
            if not following:
                continue
            cost = (sums[first + count] - sums[first]) * rates[p - stages]
            options.append((max(cost, slowest), squares + count**2, (count, *following)))
        return min(options)

    _, _, layers = best(0, p)
    return layers


def most_stages(facts: ModelFacts) -> int:
    """Stages that the model can be cut into at most."""
    return 1 + len(boundaries(facts.bonds, facts.layers))


def nearest_even(layers: int, p: int, starts: Sequence[int]) -> Cut:
    """vLLM's even cut, if each of its stages may begin where it does. If not, the cut by ``starts``
    whose largest stage is the smallest; of equal ones the most even. ``starts`` has p - 1 or more."""
    even = layer_split(layers, p)
    if set(itertools.accumulate(even[:-1])) <= set(starts):
        return even
    return _shortest([1.0] * layers, [1.0] * p, 0.0, layers, starts)


def layer_split(layers: int, p: int) -> Cut:
    """Layers per stage as vLLM cuts them: as evenly as possible, with the last stage, which also has
    the output projection, never among those with one more."""
    base, remainder = divmod(layers, p)
    return tuple(base + (p - 1 - remainder <= stage < p - 1) for stage in range(p))
