"""Tiny random models that make-model does not write: two that see, a hybrid one, and decoders of
transformers' families.

Of vLLM's models with images these need no torchvision, which its CPU build does without; of its
hybrid models not all can be cut into stages: Granite 4's loader cannot.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDE = 28
"""Pixels of an image's side: four patches of BLIP-2's."""

VOCABULARY = 1000
"""Tokens of the text; the image's come after them."""


TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def directory(path: Path, vocabulary: int = VOCABULARY) -> None:
    """``path``, with a tokenizer."""
    from benchmarks.make_model.tokenizer import write_tokenizer

    path.mkdir()
    write_tokenizer(path, vocab=vocabulary, max_positions=512)


def random_model(make: Callable, config: Any) -> Any:
    """``make`` of transformers, with weights far enough from nothing that what comes before a
    token makes a difference to it."""
    import torch

    torch.manual_seed(0)
    model = make(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    return model


def make_blip2(path: Path, text: Path | None = None) -> None:
    """BLIP-2's encoder before Llama's layers. vLLM puts an image's tokens before the prompt's.

    Args:
        text: the checkpoint of those layers, of :data:`VOCABULARY`; None: random ones.
    """
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessorPil,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    directory(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens(["<image>"])
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    words = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=1024, **TEXT)
    if text is not None:
        words = LlamaConfig.from_pretrained(text)
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            **small, num_hidden_layers=2, image_size=SIDE, patch_size=SIDE // 2
        ),
        qformer_config=Blip2QFormerConfig(
            **small, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=1024
        ),
        text_config=words,
        num_query_tokens=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = random_model(Blip2ForConditionalGeneration, config)
    if text is not None:
        model.language_model = LlamaForCausalLM.from_pretrained(text)
    model.float().save_pretrained(path)
    pixels = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(pixels, tokenizer, num_query_tokens=4).save_pretrained(path)


def make_isaac(path: Path) -> None:
    """Isaac: Siglip2 before Qwen3's layers with M-RoPE. vLLM puts an image's tokens, some seventy,
    where token ``VOCABULARY`` stands in the prompt; rows and columns are dimensions of theirs."""
    import torch
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens(["<image>", "<|image_pad|>"])
    tokenizer.save_pretrained(path)
    text = Qwen3Config(vocab_size=1024, head_dim=32, eos_token_id=2, **TEXT)
    patch, wide, inside = 16, 64, 128
    vision = {
        "hidden_size": wide,
        "intermediate_size": inside,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": patch,
        "num_patches": 16,
        "pixel_shuffle_scale_factor": 2,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(text).float()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    shapes = {
        "0.embeddings.patch_embedding": (wide, 3 * patch**2),
        "1": (16 * wide, 4 * wide),
        "3": (text.hidden_size, 16 * wide),
    }
    norms = ["0.post_layernorm"]
    for layer in ("0.encoder.layers.0", "0.encoder.layers.1"):
        shapes |= {
            f"{layer}.self_attn.{each}_proj": (wide, wide) for each in ("q", "k", "v", "out")
        }
        shapes |= {f"{layer}.mlp.fc1": (inside, wide), f"{layer}.mlp.fc2": (wide, inside)}
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
    inner = "model.vision_embedding."
    weights[f"{inner}0.embeddings.position_embedding.weight"] = torch.empty(16, wide)
    for name, shape in shapes.items():
        weights[f"{inner}{name}.weight"] = torch.empty(shape)
        if name not in ("1", "3"):
            weights[f"{inner}{name}.bias"] = torch.zeros(shape[0])
    for name in norms:
        weights[f"{inner}{name}.weight"] = torch.ones(wide)
        weights[f"{inner}{name}.bias"] = torch.zeros(wide)
    for weight in weights.values():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = text.to_dict() | {
        "model_type": "isaac",
        "architectures": ["IsaacForConditionalGeneration"],
        "dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [8, 4, 4],
        },
        "vision_config": vision,
        "vision_patch_size": patch,
        "vision_max_num_patches": 400,
        "pixel_shuffle_scale": 2,
    }
    (path / "config.json").write_text(json.dumps(config))


def make_falcon_h1(path: Path) -> None:
    """Falcon-H1: Mamba-2 and attention side by side in each layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    directory(path)
    mamba = {"d_ssm": 256, "n_heads": 8, "d_head": 32, "d_state": 16, "chunk_size": 64}
    config = FalconH1Config(
        vocab_size=VOCABULARY,
        eos_token_id=2,
        **TEXT,
        **{f"mamba_{name}": value for name, value in mamba.items()},
    )
    random_model(FalconH1ForCausalLM, config).save_pretrained(path)


def make_granite(path: Path) -> None:
    """Logits are scaled."""
    make_causal(path, "granite", logits_scaling=2.5, residual_multiplier=0.9)


def make_gemma2(path: Path) -> None:
    """Logits have a soft cap."""
    caps = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0}
    make_causal(path, "gemma2", head_dim=32, query_pre_attn_scalar=32, sliding_window=512, **caps)


def make_causal(path: Path, family: str, vocabulary: int = VOCABULARY, **more: Any) -> None:
    """A decoder of one of transformers' families, :data:`TEXT` and ``more`` its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory(path, vocabulary)
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    settings = TEXT | ends | {"tie_word_embeddings": True} | more
    config = AutoConfig.for_model(family, vocab_size=vocabulary, **settings)
    model = random_model(AutoModelForCausalLM.from_config, config)
    if (head := getattr(model, "lm_head", None)) is not None and head.bias is not None:
        head.bias.data.normal_(0, 2.0)
    model.save_pretrained(path)


def make_gemma4(path: Path) -> None:
    """Gemma 4's text with an embedding for each layer, as E2B and E4B have; the last two layers read
    the key-value caches of layers 4 and 5, the last ones of their kind before them."""
    kinds = ["sliding_attention", "full_attention"] * 4
    make_causal(
        path,
        "gemma4_text",
        num_hidden_layers=8,
        layer_types=kinds,
        num_kv_shared_layers=2,
        head_dim=32,
        global_head_dim=32,
        sliding_window=64,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
    )
