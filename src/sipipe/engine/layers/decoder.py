"""The decoder layers of an engine's model, by vLLM's configuration."""

import dataclasses
import json
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

from sipipe.engine.layers.bonds import Bond, bonds_of
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.engine.setup.derived import derived
from sipipe.errors import ConfigError, UnsupportedError

logger = init_logger(f"vllm.{__name__}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The decoder layers of a model, by which they are cut into stages."""

    layers: int
    """Number of layers, of all stages."""
    bonds: tuple[Bond, ...]
    """Layers that have to be on one stage."""
    facts: ModelFacts | None
    """Sizes of the model's weights; None where its configuration does not tell them."""


def decoder_of(vllm_config: VllmConfig) -> Decoder:
    """The decoder of the model that ``vllm_config`` names, worked out once. Writes a line to the log
    where the sizes of its weights are not known."""
    return derived(vllm_config, Decoder, vllm_config.model_config, lambda: _decoder(vllm_config))


def _decoder(vllm_config: VllmConfig) -> Decoder:
    """The decoder, from the model's own configuration and vLLM's."""
    model = vllm_config.model_config
    layers = model.get_total_num_hidden_layers()
    bonds = _bonds(vllm_config)
    facts = facts_of(model)
    if facts is not None and facts.layers != layers:
        facts = None
    if facts is not None:
        # The configuration of the text model, which facts are read from, has no fields of the vision
        # model, which bonds can come from.
        facts = dataclasses.replace(facts, bonds=bonds)
    return Decoder(layers=layers, bonds=bonds, facts=facts)


def _bonds(vllm_config: VllmConfig) -> tuple[Bond, ...]:
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


def facts_of(model: ModelConfig) -> ModelFacts | None:
    """Sizes of the model's weights. None, with a line in the log, where its configuration does not
    tell them."""
    try:
        fields = json.loads(model.hf_text_config.to_json_string(use_diff=False))
        # vLLM decides the dtype, whatever the file has.
        fields["dtype"] = str(model.dtype).removeprefix("torch.")
        return facts_from_config(fields, name=str(model.model))
    except (ConfigError, UnsupportedError, TypeError) as error:
        # TypeError: a field is no JSON.
        logger.info("The weights of %s are not known: %s", model.model, error)
        return None
