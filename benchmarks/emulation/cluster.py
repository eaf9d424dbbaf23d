"""Profiles of emulated devices, from the planner's costs."""

import dataclasses
import re
from collections.abc import Callable

from benchmarks.emulation.profile import Curve, Profile, StageProfile
from sipipe.engine.layers.cut import Drafting, cut_layers, layer_split, share_projection
from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner import hardware
from sipipe.tools.planner.costs import DatasheetCosts, datasheet_costs
from sipipe.tools.planner.hardware import Cluster
from sipipe.tools.planner.models import builtin_models, load_model
from sipipe.tools.planner.placement import Placement, Stage, place
from sipipe.tools.planner.workload import Microbatch, Workload

_HOST = 8  # devices of a host
_NAME = re.compile(r"(.+)-(\d+)x([a-z0-9-]+)")
_POINTS = tuple(2**i for i in range(15))
_FAR = 4096  # tokens of context at which attention's share is taken; it is proportional


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulation:
    """A model on a cluster, and what its devices take."""

    facts: ModelFacts
    cluster: Cluster
    placement: Placement
    profile: Profile


def emulation(
    name: str,
    pp: int,
    *,
    cut: tuple[int, ...] | None = None,
    shared: bool = False,
    drafts: int = 0,
    jitter: float,
) -> Emulation:
    """What ``name``, such as ``llama-70b-8xh100``, stands for with ``pp`` stages.

    Args:
        cut: layers of each stage; None: as SiPipe would cut them.
        shared: whether the output projection is shared out over the stages.
        drafts: drafts that a head on the last stage makes of each sequence; 0: there is no head.
        jitter: standard deviation of forward passes, as a share.

    Raises:
        ConfigError: a name or number that does not fit.
    """
    found = _NAME.fullmatch(name.lower())
    if found is None:
        raise ConfigError(
            f'--profile "{name}" is not of the form MODEL-NxGPU such as llama-70b-8xh100 '
            "(sipipe plan --list shows the names)"
        )
    model, count = _model(found[1]), int(found[2])
    if not 1 <= pp <= count or count % pp:
        raise ConfigError(f"--pp {pp}: {count} devices do not make {pp} equal stages")
    cluster = Cluster(
        device=hardware.device(found[3]),
        hosts=-(-count // _HOST),
        devices_per_host=min(count, _HOST),
        network=hardware.network(400.0),
        cores_per_host=96,
    )
    facts = load_model(model)
    if pp > facts.layers:
        raise ConfigError(f"--pp {pp}: {model} has {facts.layers} layers, a stage needs one")
    if shared and (pp == 1 or cluster.hosts > 1):
        raise ConfigError(
            "emulate: --vocabulary shared is for several stages on one host, of 8 devices at most"
        )
    t = count // pp
    best = cut_layers(facts, pp, t, drafting=Drafting(drafts=drafts))
    heads = int(drafts > 0)
    cut = cut or (layer_split(facts.layers, pp) if shared else best)
    if len(cut) != pp or sum(cut) != facts.layers:
        raise ConfigError(f"--layers: {pp} numbers, {facts.layers} together, not {list(cut)}")
    parts = share_projection(facts, best, cut, t, device="gpu")[0] if shared else ()
    placement = place(facts.layers, pp, t, cluster.devices_per_host, cut, parts, heads)
    workload = Workload()
    costs = datasheet_costs(facts, cluster, workload)
    memory = costs.memory(placement, workload.memory_utilization)
    alone = place(facts.layers, pp, t, cluster.devices_per_host, cut)
    if memory.kv_tokens < 1:
        raise ConfigError(f"--profile {name}: {model} does not fit into its devices' memory")
    last = alone.stages[-1]
    profile = Profile(
        name=name,
        stages=tuple(_stage(costs, stage) for stage in alone.stages),
        copy=_curve(lambda rows: costs.logits_copy(last, _work(rows))),
        kv_tokens=memory.kv_tokens,
        jitter=jitter,
        head=_head(costs, last) if drafts else None,
    )
    return Emulation(facts=facts, cluster=cluster, placement=placement, profile=profile)


def _model(name: str) -> str:
    """The built-in model of that name; also ``llama-70b`` for one of ``llama-3.1-70b``."""
    family, _, size = name.rpartition("-")
    close = [
        known
        for known in builtin_models()
        if known == name or (family and known.startswith(family) and known.endswith(f"-{size}"))
    ]
    if name in close or len(close) == 1:
        return name if name in close else close[0]
    known = ", ".join(close or builtin_models())
    raise ConfigError(f'--profile: model "{name}" is none of {known}')


def _stage(costs: DatasheetCosts, stage: Stage) -> StageProfile:
    def layers(tokens: int) -> float:
        parts = costs.forward(stage, _work(tokens), gather=False)
        return sum(parts.values()) - parts["logits"] - parts["attention"]

    def attention(batch: int, tokens: int) -> float:
        work = Microbatch(batch=batch, tokens=tokens, context=_FAR, prompt_context=_FAR)
        return costs.forward(stage, work, gather=False)["attention"] / _FAR

    return StageProfile(
        layers=_curve(layers),
        projection=_curve(lambda rows: costs.forward(stage, _work(rows), gather=False)["logits"]),
        hop=_curve(lambda tokens: costs.hop(stage, _work(tokens))),
        decode_context=attention(1, 1),
        prompt_context=attention(0, 1),
    )


def _head(costs: DatasheetCosts, last: Stage) -> StageProfile:
    """A head of one layer like the model's last, and the output projection."""
    return _stage(costs, dataclasses.replace(last, layer_range=last.layer_range[-1:]))


def _work(tokens: int) -> Microbatch:
    return Microbatch(batch=tokens, tokens=tokens, context=0)


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve(at=_POINTS, seconds=tuple(seconds(point) for point in _POINTS))
