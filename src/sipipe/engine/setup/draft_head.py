"""Draft heads on the last stage: which methods have one, and what such a head does not go with.

A draft model of its own is hosted like a head: it is vLLM's speculator beside the last stage, too.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

HEADS = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of vLLM's whose drafts a head on the last stage makes (:mod:`sipipe.worker.drafter`)."""


def head_of(vllm_config: VllmConfig) -> Any:
    """vLLM's ``SpeculativeConfig`` where a head on the last stage makes the drafts; else None."""
    speculative = vllm_config.speculative_config
    return speculative if speculative is not None and speculative.method in HEADS else None


def why_no_head(vllm_config: VllmConfig) -> str:
    """Reason for which the draft head of this configuration cannot be hosted, as a clause for messages;
    empty where it can, or where there is none."""
    speculative = head_of(vllm_config)
    if speculative is None:
        return ""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    head_ranks = speculative.draft_parallel_config.tensor_parallel_size
    drafting = speculative.draft_model_config
    of_its_own = speculative.uses_draft_model()
    reasons = {
        "several MTP modules": speculative.use_multi_module_mtp(),
        "Gemma 4's, which reads the target's KV cache": speculative.use_gemma4_mtp(),
        "a multi-modal draft model": of_its_own and drafting.is_multimodal_model,
        "a draft model with recurrent states": of_its_own and drafting.has_inner_state,
        '"use_heterogeneous_vocab"': speculative.use_heterogeneous_vocab,
        "--enable-lora": vllm_config.lora_config is not None,
        '"draft_sample_method": "probabilistic"': (
            speculative.draft_sample_method == "probabilistic"
        ),
        f'"draft_tensor_parallel_size" {head_ranks}': head_ranks != ranks,
        '"enable_adaptive_verification"': speculative.enable_adaptive_verification,
        '"parallel_drafting"': speculative.parallel_drafting,
    }
    for reason, holds in reasons.items():
        if holds:
            return f'method "{speculative.method}" with {reason}'
    return ""
