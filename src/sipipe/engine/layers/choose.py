"""Choice of each stage's layers: vLLM's even cut, SiPipe's by cost, or the user's.

vLLM's models call ``get_pp_indices``, which reads ``VLLM_PP_LAYER_PARTITION``. Each worker sets that
in its own environment, so that nothing is left in the process that holds the engine.
"""

import math
from collections.abc import Sequence
from typing import Literal

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.bonds import Bond, boundaries, broken
from sipipe.engine.layers.cut import (
    NO_DRAFTING,
    Cut,
    Drafting,
    cut_layers,
    kv_lost,
    layer_split,
    measured_cut,
    nearest_even,
    speed_up,
)
from sipipe.engine.layers.decoder import Decoder, facts_of
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.rank_files import stored_cut
from sipipe.errors import ConfigError

VARIABLE = "VLLM_PP_LAYER_PARTITION"


def choose_layers(
    vllm_config: VllmConfig, config: SiPipeConfig, decoder: Decoder, *, by_cost: bool
) -> tuple[int, ...]:
    """Choose the number of decoder layers of each stage.

    With ``by_cost``, ``"layers": "auto"`` may cut by the cost of the output projection. Where vLLM's
    sampler is on the last stage too, its cost is not known, and vLLM's cut stays.

    Raises ConfigError: ``"layers"`` does not fit the model or the stages, or contradicts
    ``VLLM_PP_LAYER_PARTITION``."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    total = decoder.layers
    bonds = decoder.bonds
    if config.layers != "auto" and envs.VLLM_PP_LAYER_PARTITION is not None:
        raise ConfigError(
            f'sipipe config: "layers" and {VARIABLE} both cut the layers: leave one of them out'
        )
    stored = stored_cut(vllm_config)
    if isinstance(config.layers, tuple):
        _check_named(decoder, config.layers, stages, stored)
        return config.layers
    if stored is not None and is_free(config):
        return stored
    starts = boundaries(bonds, total)
    if config.layers == "auto" and bonds and len(starts) < stages - 1 < total:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: {bonds[0]} of this model have to be on one stage, which "
            f"leaves room for {len(starts) + 1} stages at most"
        )
    if by_cost and is_free(config) and 1 < stages <= total and decoder.facts is not None:
        return _cut(vllm_config, decoder.facts, config.kv_loss)
    cut = _vllms_cut(total, stages)
    if is_free(config) and bonds:
        return nearest_even(total, stages, starts)
    option = VARIABLE if envs.VLLM_PP_LAYER_PARTITION is not None else '"layers" "even"'
    _check_bonds(bonds, cut, option)
    _check_stored(stored, cut, option)
    return cut


def _check_named(decoder: Decoder, layers: Cut, stages: int, stored: Cut | None) -> None:
    """Refuse a cut of the user's that does not fit. Raises ConfigError."""
    if len(layers) != stages or sum(layers) != decoder.layers:
        raise ConfigError(
            f'sipipe config: "layers" must have one number for each of the {stages} stages, '
            f"{decoder.layers} layers together, not {list(layers)}"
        )
    option = '"layers" in the sipipe config'
    _check_bonds(decoder.bonds, layers, option)
    _check_stored(stored, layers, option)


def _vllms_cut(total: int, stages: int) -> Cut:
    """The cut that vLLM's models would make, by ``VLLM_PP_LAYER_PARTITION`` if that is set. Raises
    ConfigError: the variable does not fit the model or the stages."""
    try:
        bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
        cut = tuple(end - first for first, end in bounds)
        if min(cut) < 1:
            raise ValueError("each stage needs a layer")
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None
    return cut


def _check_stored(stored: Cut | None, layers: Cut, option: str) -> None:
    """Refuse another cut than the one for which a checkpoint is stored by rank. Raises ConfigError,
    which names ``option``."""
    if stored is not None and layers != stored:
        raise ConfigError(
            f"{option} cuts {list(layers)}, but MODEL is stored by rank for {list(stored)} "
            '(--load-format): "auto" takes those'
        )


def _check_bonds(bonds: tuple[Bond, ...], layers: Cut, option: str) -> None:
    """Refuse a cut that breaks a bond. Raises ConfigError, which names ``option`` and a cut that works."""
    bond = broken(bonds, layers)
    if bond is None:
        return
    starts = boundaries(bonds, sum(layers))
    remedy = 'serve it with "layers": "auto", or with fewer stages'
    if len(starts) >= len(layers) - 1:
        possible = list(nearest_even(sum(layers), len(layers), starts))
        remedy = f'"layers" {possible} or "auto" keep them so'
    raise ConfigError(
        f"{option} cuts {list(layers)}: {bond} of this model have to be on one stage; {remedy}"
    )


def is_free(config: SiPipeConfig) -> bool:
    """True if the user leaves the cut to SiPipe."""
    return config.layers == "auto" and envs.VLLM_PP_LAYER_PARTITION is None


def _cut(vllm_config: VllmConfig, facts: ModelFacts, kv_loss: float) -> tuple[int, ...]:
    """The cut by cost that takes at most the part ``kv_loss`` of the KV cache's tokens."""
    parallel = vllm_config.parallel_config
    return cut_layers(
        facts,
        parallel.pipeline_parallel_size,
        parallel.tensor_parallel_size,
        device=device_kind(),
        kv_loss=kv_loss,
        memory=_memory(vllm_config),
        drafting=_drafting(vllm_config),
    )


def cut_for_times(
    vllm_config: VllmConfig,
    facts: ModelFacts,
    kv_loss: float,
    layers: Cut,
    seconds: Sequence[float],
    behind: float,
) -> tuple[Cut, float]:
    """The cut that takes at most the part ``kv_loss`` of the KV cache's tokens, and would have been best for
    times that were measured; arguments and result as those of :func:`.measured_cut`."""
    return measured_cut(
        facts=facts,
        layers=layers,
        seconds=seconds,
        behind=behind,
        t=vllm_config.parallel_config.tensor_parallel_size,
        device=device_kind(),
        kv_loss=kv_loss,
        memory=_memory(vllm_config),
        drafting=_drafting(vllm_config),
    )


def _drafting(vllm_config: VllmConfig) -> Drafting:
    """Return who makes drafts on the last stage."""
    speculative = head_of(vllm_config)
    if speculative is None:
        return NO_DRAFTING
    model = None
    if speculative.uses_draft_model():
        model = facts_of(speculative.draft_model_config)
    return Drafting(drafts=int(speculative.num_speculative_tokens), model=model)


def device_kind() -> Literal["cpu", "gpu"]:
    """The kind of device that the stages compute on."""
    return "cpu" if current_platform.is_cpu() else "gpu"


def _memory(vllm_config: VllmConfig) -> float:
    """Bytes of a GPU for weights and KV cache. Infinite on CPUs, where all stages' caches have as many
    bytes whatever their weights take."""
    if current_platform.is_cpu():
        return math.inf
    share: float = vllm_config.cache_config.gpu_memory_utilization
    return int(current_platform.get_device_total_memory()) * share


def describe_layers(
    vllm_config: VllmConfig,
    config: SiPipeConfig,
    decoder: Decoder,
    layers: tuple[int, ...],
    *,
    by_cost: bool,
) -> str:
    """One line on the stages' layers: how they differ from vLLM's cut and what that costs, or what a
    cut would be worth that costs too much. Empty where there is nothing to say. ``by_cost`` as
    :func:`choose_layers`."""
    even = layer_split(sum(layers), len(layers))
    free = by_cost and is_free(config)
    facts = decoder.facts
    tp = vllm_config.parallel_config.tensor_parallel_size
    memory = _memory(vllm_config)
    drafting = _drafting(vllm_config)

    def cost(cut: tuple[int, ...]) -> str:
        lost = kv_lost(facts, cut, tp, memory, drafting) if facts is not None else 0.0
        return f"{lost:.0%} of the KV cache's tokens" if lost > 0 else "no KV cache"

    def text(cut: tuple[int, ...]) -> str:
        return ", ".join(map(str, cut))

    remarks = []
    if layers != even:
        remarks.append(f"evenly cut: {text(even)}; costs {cost(layers)}")
    if free and facts is not None:
        best = _cut(vllm_config, facts, 1.0)
        if best != layers:
            gain = speed_up(facts, layers, best, tp, device=device_kind(), drafting=drafting)
            remarks.append(
                f"{text(best)} would be {gain:.2f} x as quick in the slowest stage and cost "
                f'{cost(best)}, more than "kv_loss" {config.kv_loss:g} allows'
            )
    if decoder.bonds and len(layers) > 1:
        remarks.append(f"kept on one stage: {'; '.join(map(str, decoder.bonds[:3]))}")
    return f"Layers of the stages: {text(layers)} ({'; '.join(remarks)})" if remarks else ""
