"""Settings of speculative decoding: the user's, completed, checked, and handed on to who needs them.

Who runs here: the process that makes a configuration, before its engine is started.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, get_args

from vllm.config import VllmConfig
from vllm.config.speculative import MTPModelTypes

from sipipe.engine.setup.draft_head import HEADS, why_no_head
from sipipe.errors import ConfigError, UnsupportedError
from sipipe.messages.start_records import NGramSettings, SuffixSettings

MOST = 16
"""The most drafts with ``{"method": "ngram"}`` and nothing else: how many of them are worth it is
decided anew each time."""
LENGTHS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""Tokens of the phrases that n-gram drafts are looked up by, where the user names none."""
SETTINGS: dict[str | None, Any] = {"ngram": NGramSettings, "suffix": SuffixSettings}
"""Settings of the samplers, by the methods that they have."""


def asked_of_drafts(args: Any) -> dict[str, Any]:
    """The fields of ``--speculative-config`` in vLLM's ``EngineArgs``; none where it is left out. Raises
    ConfigError: it is no object."""
    config = args.speculative_config
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ConfigError(
            '--speculative-config must be an object such as {"method": "ngram"}, '
            f"not {config!r:.60}"
        )
    return config


def fill_in(args: Any) -> str:
    """Fill in, in vLLM's ``EngineArgs``, what it wants to be told and SiPipe decides by itself.

    Returns the model that is to make the drafts, or nothing. Raises UnsupportedError: another method,
    before vLLM looks for its model, or a library is missing.
    """
    config = {
        str(option).replace("-", "_"): value for option, value in asked_of_drafts(args).items()
    }
    flags = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    options = config | {flag: value for flag, value in flags.items() if value is not None}
    if not options:
        return ""
    method = str(options.get("method") or options.get("model") or "ngram").strip("[]")
    # Without a method, vLLM derives it from the model.
    derived = method not in SETTINGS and options.get("method") is None
    if derived or method in (*HEADS, *get_args(MTPModelTypes)):
        return str(options.get("model") or "")
    if method not in SETTINGS:
        raise UnsupportedError(_refused(f'"{method}"'))
    if method == "suffix" and find_spec("arctic_inference") is None:
        raise UnsupportedError(
            '--speculative-config: method "suffix" needs Arctic Inference: '
            "pip install arctic-inference==0.1.1"
        )
    if method == "ngram":
        defaults = {"num_speculative_tokens": MOST}
        if not options.keys() & LENGTHS.keys():  # from one of them, vLLM makes the other
            defaults |= LENGTHS
        config |= {name: value for name, value in defaults.items() if name not in options}
    args.speculative_config = config
    return ""


def check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse what the samplers cannot propose or verify (UnsupportedError: the option)."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    model = vllm_config.model_config
    reasons = {
        f'method "{speculative.method}"': speculative.method not in (*SETTINGS, *HEADS),
        "num_speculative_tokens_per_batch_size (SiPipe decides by measured times)": (
            speculative.uses_dynamic_speculative_decoding()
        ),
        "a model with recurrent states": model.has_inner_state,
        "encoder-decoder models": model.is_encoder_decoder,
        "a model whose prefill leaves tokens out": model.rswa_window is not None,
        "--kv-sharing-fast-prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
        f'"rejection_sample_method": "{speculative.rejection_sample_method}"': (
            speculative.rejection_sample_method != "standard"
        ),
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
    }
    reasons[why_no_head(vllm_config)] = bool(why_no_head(vllm_config))
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(_refused(reason))


def _refused(what: str) -> str:
    return (
        f"--speculative-config: SiPipe does not support {what}: take "
        '{"method": "ngram"} without it, or leave the option out'
    )


def proposing(vllm_config: VllmConfig) -> NGramSettings | SuffixSettings | None:
    """The settings that samplers propose drafts by; None: they propose none.

    A setting has the name of vLLM's, whose values these are.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in HEADS:
        return None
    kind = SETTINGS[speculative.method]
    values = {field.name: getattr(speculative, field.name) for field in fields(kind)}
    settings: NGramSettings | SuffixSettings = kind(**values)
    return settings


def without_speculation(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration of the stages: their preparation places drafts as it places other tokens, and
    vLLM's runner has no drafter to make, no part of its own in them."""
    without = copy.copy(vllm_config)
    without.speculative_config = None
    return without
