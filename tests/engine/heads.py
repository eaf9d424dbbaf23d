"""Tiny checkpoints with draft heads that are right now and then.

The target's layers are made weak, so that its next token depends most on its last one: a head that
hands the embedding of that token on guesses what the target draws, often and not always. All weights
are random and deterministic, as :func:`benchmarks.make_model.checkpoint.make_model` draws them.
"""

import json
import shutil
from pathlib import Path

import torch
from benchmarks.make_model.checkpoint import draw, make_model
from safetensors.torch import load_file, save_file
from tests.engine.tiny_models import make_blip2

WEAK = 0.35
"""Factor of what the target's layers add."""
LAYERS = 4
"""Layers of a target, unless a test needs more stages."""


def target(directory: Path, family: str = "llama", layers: int = LAYERS) -> Path:
    """The checkpoint of a model whose layers add little."""
    path = directory / f"{family}-weak-{layers}"
    if not path.exists():
        make_model(family, path, layers=layers)
        weights = load_file(path / "model.safetensors")
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name] *= WEAK
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def eagle(directory: Path) -> Path:
    """An EAGLE head of :func:`target`, of any layers: one over the last token's embedding and hidden
    state."""
    path = directory / "eagle-head"
    if not path.exists():
        config = json.loads((target(directory) / "config.json").read_text())
        weights = _layer(config, "layers.0.", inputs=1)
        del weights["layers.0.input_layernorm.weight"]
        hidden = config["hidden_size"]
        weights["fc.weight"] = torch.cat((torch.eye(hidden), 0.05 * torch.eye(hidden)), dim=1)
        _write(path, config | {"num_hidden_layers": 1}, weights)
    return path


def eagle3(
    directory: Path, *, draft_vocab: int | None = None, taps: bool = True, layers: int = LAYERS
) -> Path:
    """An EAGLE-3 head of :func:`target`, which reads hidden states of its first, middle and last layer.

    Args:
        draft_vocab: it proposes these many tokens alone, every third of the vocabulary.
        taps: False: it reads the last layer's alone.
        layers: of the target.
    """
    path = directory / f"eagle3-head-{layers}-{draft_vocab or 'all'}-{'taps' if taps else 'last'}"
    if not path.exists():
        folder = target(directory, layers=layers)
        config = json.loads((folder / "config.json").read_text())
        hidden = config["hidden_size"]
        weights = _layer(config, "midlayer.", inputs=2)
        weights |= _hands_on(config, "midlayer.self_attn.")
        weights["midlayer.input_layernorm.weight"] = torch.ones(hidden)
        weights["midlayer.hidden_norm.weight"] = torch.ones(hidden)
        if taps:
            weights["fc.weight"] = 0.1 * torch.eye(hidden).repeat(1, 3)
        weights["norm.weight"] = torch.ones(hidden)
        head = load_file(folder / "model.safetensors")["lm_head.weight"]
        tapped = [1, layers // 2, layers]
        config |= {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": tapped}
        if not taps:
            config["eagle_config"] = {"use_aux_hidden_state": False}
        if draft_vocab is not None:
            chosen = torch.arange(draft_vocab) * 3
            head = head[chosen].clone()
            weights["d2t"] = chosen - torch.arange(draft_vocab)
            config["draft_vocab_size"] = draft_vocab
        weights["lm_head.weight"] = head
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        _write(path, config, weights)
    return path


def blip2(directory: Path) -> Path:
    """A BLIP-2 whose text is :func:`target`'s. The token that stands for an image is none of the text's
    vocabulary: a head knows none of that number."""
    path = directory / "blip2-weak"
    if not path.exists():
        scratch = directory / "blip2-scratch"
        make_blip2(scratch, text=target(directory))
        scratch.rename(path)
    return path


def draft_model(directory: Path) -> Path:
    """A model of :func:`target`'s first layer alone, with its embedding and output projection."""
    return target(directory, layers=1)


def mimo(directory: Path) -> Path:
    """A MiMo: a Qwen2 with a layer of its own that predicts the token after the next (MTP)."""
    path = directory / "mimo"
    if not path.exists():
        scratch = directory / "mimo-scratch"
        shutil.copytree(target(directory, "qwen2"), scratch)
        config = json.loads((scratch / "config.json").read_text())
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (scratch / "config.json").write_text(json.dumps(config))
        weights = load_file(scratch / "model.safetensors")
        prefix = "model.mtp_layers.0."
        weights |= _layer(config, prefix, inputs=1, bias=True)
        hidden = config["hidden_size"]
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
        eye = torch.eye(hidden)
        weights[f"{prefix}input_proj.weight"] = torch.cat((0.05 * eye, eye), dim=1)
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        scratch.rename(path)
    return path


def _layer(config: dict, prefix: str, *, inputs: int, bias: bool = False) -> dict:
    """The weights of a decoder layer that adds little, its attention over ``inputs`` x hidden."""
    hidden = config["hidden_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj.weight": (queries, inputs * hidden),
        "self_attn.k_proj.weight": (keys, inputs * hidden),
        "self_attn.v_proj.weight": (keys, inputs * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
        "mlp.up_proj.weight": (config["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if bias:
        shapes |= {"self_attn.q_proj.bias": (queries,)}
        shapes |= {"self_attn.k_proj.bias": (keys,), "self_attn.v_proj.bias": (keys,)}
    weights = {}
    for name, shape in shapes.items():
        weights[prefix + name] = draw(prefix + name, torch.empty(shape), seed=1)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[prefix + name] *= WEAK
    return weights


def _hands_on(config: dict, prefix: str) -> dict:
    """An attention that looks at its own position, and hands on as much of the token's embedding, the
    first of its two inputs, as its values hold: a token is like itself more than like others."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    part = torch.cat(
        (torch.eye(groups * width, hidden), torch.zeros(groups * width, hidden)), dim=1
    )
    queries = part.view(groups, width, -1).repeat_interleave(heads // groups, dim=0)
    out = torch.zeros(hidden, heads * width)
    for group in range(groups):
        head = group * (heads // groups)
        rows = slice(group * width, (group + 1) * width)
        out[rows, head * width : (head + 1) * width] = 3 * torch.eye(width)
    return {
        f"{prefix}q_proj.weight": 1.5 * queries.reshape(heads * width, -1),
        f"{prefix}k_proj.weight": 1.5 * part,
        f"{prefix}v_proj.weight": part,
        f"{prefix}o_proj.weight": out,
    }


def _write(path: Path, config: dict, weights: dict) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
