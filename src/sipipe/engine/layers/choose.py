"""Choice of each stage's layers: vLLM's even cut, SiPipe's by cost, or the user's.

vLLM's models call ``get_pp_indices``, which reads ``VLLM_PP_LAYER_PARTITION``. Each worker sets that
in its own environment, so that nothing is left in the process that holds the engine.
"""

import dataclasses
import json
import math
from typing import Any, Literal

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.bonds import Bond, bonds_of, boundaries, broken
from sipipe.engine.layers.cut import Cut, cut_layers, kv_lost, layer_split, nearest_even, speed_up
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.rank_files import stored_cut
from sipipe.errors import ConfigError, UnsupportedError

VARIABLE = "VLLM_PP_LAYER_PARTITION"

logger = init_logger(f"vllm.{__name__}")


def choose_layers(
    vllm_config: VllmConfig, config: SiPipeConfig, *, by_cost: bool
) -> tuple[int, ...]:
    """Choose the number of decoder layers of each stage.

    With ``by_cost``, ``"layers": "auto"`` may cut by the cost of the output projection. Where vLLM's
    sampler is on the last stage too, its cost is not known, and vLLM's cut stays.

    Raises ConfigError: ``"layers"`` does not fit the model or the stages, or contradicts
    ``VLLM_PP_LAYER_PARTITION``."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    if config.layers != "auto" and envs.VLLM_PP_LAYER_PARTITION is not None:
        raise ConfigError(
            f'sipipe config: "layers" and {VARIABLE} both cut the layers: leave one of them out'
        )
    stored = stored_cut(vllm_config)
    if isinstance(config.layers, tuple):
        _check_named(vllm_config, config.layers, stored)
        return config.layers
    if stored is not None and is_free(config):
        return stored
    bonds = model_bonds(vllm_config)
    starts = boundaries(bonds, total)
    if config.layers == "auto" and bonds and len(starts) < stages - 1 < total:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: {bonds[0]} of this model have to be on one stage, which "
            f"leaves room for {len(starts) + 1} stages at most"
        )
    if by_cost and is_free(config) and 1 < stages <= total:
        facts = model_facts(vllm_config)
        if facts is not None:
            return _cut(vllm_config, facts, config.kv_loss)
    cut = _vllms_cut(total, stages)
    if is_free(config) and bonds:
        return nearest_even(total, stages, starts)
    option = VARIABLE if envs.VLLM_PP_LAYER_PARTITION is not None else '"layers" "even"'
    _check_bonds(vllm_config, cut, option)
    _check_stored(stored, cut, option)
    return cut


def _check_named(vllm_config: VllmConfig, layers: Cut, stored: Cut | None) -> None:
    """Refuse a cut of the user's that does not fit. Raises ConfigError."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    if len(layers) != stages or sum(layers) != total:
        raise ConfigError(
            f'sipipe config: "layers" must have one number for each of the {stages} stages, '
            f"{total} layers together, not {list(layers)}"
        )
    option = '"layers" in the sipipe config'
    _check_bonds(vllm_config, layers, option)
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


def model_bonds(vllm_config: VllmConfig) -> tuple[Bond, ...]:
    """The layers of the model that have to be on one stage."""
    model = vllm_config.model_config
    # Omni models have their text and vision models in a part of their own.
    thinker = getattr(model.hf_config, "thinker_config", model.hf_config)
    vision = getattr(thinker, "vision_config", None)
    return bonds_of(_fields(model.hf_text_config), _fields(vision))


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a part of the model's configuration. It may be a dict, or None for no field."""
    if config is None or isinstance(config, dict):
        return dict(config or {})
    return dict(config.to_dict())


def _check_stored(stored: Cut | None, layers: Cut, option: str) -> None:
    """Refuse another cut than the one for which a checkpoint is stored by rank. Raises ConfigError,
    which names ``option``."""
    if stored is not None and layers != stored:
        raise ConfigError(
            f"{option} cuts {list(layers)}, but MODEL is stored by rank for {list(stored)} "
            '(--load-format): "auto" takes those'
        )


def _check_bonds(vllm_config: VllmConfig, layers: tuple[int, ...], option: str) -> None:
    """Refuse a cut that breaks a bond. Raises ConfigError, which names ``option`` and a cut that works."""
    bonds = model_bonds(vllm_config)
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
        drafts=head_drafts(vllm_config),
    )


def head_drafts(vllm_config: VllmConfig) -> int:
    """Drafts that a head on the last stage makes of each request in a pass; 0 without one."""
    speculative = head_of(vllm_config)
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


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
    vllm_config: VllmConfig, config: SiPipeConfig, layers: tuple[int, ...], *, by_cost: bool
) -> str:
    """One line on the stages' layers: how they differ from vLLM's cut and what that costs, or what a
    cut would be worth that costs too much. Empty where there is nothing to say. ``by_cost`` as
    :func:`choose_layers`."""
    even = layer_split(sum(layers), len(layers))
    free = by_cost and is_free(config)
    facts = model_facts(vllm_config) if layers != even or free else None
    tp = vllm_config.parallel_config.tensor_parallel_size
    memory = _memory(vllm_config)

    def cost(cut: tuple[int, ...]) -> str:
        lost = kv_lost(facts, cut, tp, memory) if facts is not None else 0.0
        return f"{lost:.0%} of the KV cache's tokens" if lost > 0 else "no KV cache"

    def text(cut: tuple[int, ...]) -> str:
        return ", ".join(map(str, cut))

    bonds = model_bonds(vllm_config) if len(layers) > 1 else ()
    remarks = []
    if layers != even:
        remarks.append(f"evenly cut: {text(even)}; costs {cost(layers)}")
    if free and facts is not None:
        best = _cut(vllm_config, facts, 1.0)
        if best != layers:
            drafts = head_drafts(vllm_config)
            gain = speed_up(facts, layers, best, tp, device=device_kind(), drafts=drafts)
            remarks.append(
                f"{text(best)} would be {gain:.2f} x as quick in the slowest stage and cost "
                f'{cost(best)}, more than "kv_loss" {config.kv_loss:g} allows'
            )
    if bonds:
        remarks.append(f"kept on one stage: {'; '.join(map(str, bonds[:3]))}")
    return f"Layers of the stages: {text(layers)} ({'; '.join(remarks)})" if remarks else ""


def model_facts(vllm_config: VllmConfig) -> ModelFacts | None:
    """Sizes of the model's weights. None, with a line in the log, where its configuration does not
    tell them."""
    model = vllm_config.model_config
    try:
        fields = json.loads(model.hf_text_config.to_json_string(use_diff=False))
        # vLLM decides the dtype, whatever the file has.
        fields["dtype"] = str(model.dtype).removeprefix("torch.")
        facts = facts_from_config(fields, name=str(model.model))
    except (ConfigError, UnsupportedError, TypeError) as error:
        # TypeError: a field is no JSON.
        logger.info("The model's weights are not known: %s", error)
        return None
    # Of its vision nothing stands in the text's configuration.
    facts = dataclasses.replace(facts, bonds=model_bonds(vllm_config))
    return facts if facts.layers == model.get_total_num_hidden_layers() else None
