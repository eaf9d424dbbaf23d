"""Model families whose stages have been compared with one stage by tests of SiPipe.

docs/compatibility.md has the same list with the test of each; ``tests/engine/self_test`` holds the
two equal. A family that is not here is compared when an engine first starts with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

VERIFIED = frozenset(
    {
        "Blip2ForConditionalGeneration",
        "BloomForCausalLM",
        "CohereForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "FalconH1ForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "IsaacForConditionalGeneration",
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Architectures, as ``config.json`` names them."""


def implementation_of(model: ModelConfig) -> str:
    """Name of what vLLM takes the model's class from, as far as its configuration tells."""
    architecture = next(iter(model.architectures), "")
    registered = model.registry.models.get(architecture)
    module = getattr(registered, "module_name", "")
    return f"{model.model_impl} {module} {model.model_class_overrides or ''}".strip()


def is_verified(model: ModelConfig) -> bool:
    """True where the model is of a verified family, in vLLM's own implementation of it."""
    architecture = next(iter(model.architectures), "")
    registered = model.registry.models.get(architecture)
    of_vllm = getattr(registered, "module_name", "").startswith("vllm.")
    usual = str(model.model_impl) in ("auto", "vllm") and not model.model_class_overrides
    return architecture in VERIFIED and of_vllm and usual
