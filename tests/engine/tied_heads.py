"""Tiny random models whose output projection is the embedding, and whose logits are more than its
product: Granite's are scaled, Gemma 2's have a soft cap."""

from pathlib import Path

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_granite(path: Path) -> None:
    _make(path, "granite", logits_scaling=2.5, residual_multiplier=0.9)


def make_gemma2(path: Path) -> None:
    caps = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0}
    _make(path, "gemma2", head_dim=32, query_pre_attn_scalar=32, sliding_window=512, **caps)


def _make(path: Path, family: str, **more) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sipipe.tools.make_model.tokenizer import write_tokenizer

    path.mkdir()
    write_tokenizer(path, vocab=1000, max_positions=512)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **more)).float()
    for weight in model.parameters():
        if weight.dim() > 1:  # far enough from nothing that the tokens before make a difference
            weight.data.normal_(0, 0.2)
    model.save_pretrained(path)
