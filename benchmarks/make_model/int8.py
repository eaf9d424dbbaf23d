"""A llama checkpoint with weights and activations of 8 bits, and what that costs in perplexity.

    sipipe make-model smollm2 build/models/SmolLM2-135M-Instruct
    python -m benchmarks.make_model.int8 build/models/SmolLM2-135M-Instruct build/models/SmolLM2-135M-Instruct-int8

The format is compressed-tensors' W8A8, which vLLM's CPU build multiplies by oneDNN: each row of a
weight matrix has a scale, and so has each token of its input, while it runs. Weights are rounded to the
nearest step; nothing is calibrated. Embeddings, norms and the output projection stay as they are. For a
model that people depend on, take a checkpoint that was made with care (llm-compressor).

The perplexities are of one text, in windows of 512 tokens, computed in float32 by transformers: with the
model's weights, and with the rounded ones and rounded inputs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.smollm2 import place

STEPS = 127
"""Steps of an 8-bit number on each side of zero."""
WINDOW = 512
"""Tokens of a window of text; each window begins without context."""
TEXT = Path(__file__).with_name("corpus.txt")
"""English text that was written for this project."""
WEIGHTS = "model.safetensors"
_INT8 = {"num_bits": STEPS.bit_length() + 1, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
"""``quantization_config`` of the checkpoint's config.json."""


def rounded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``values`` in steps of their own size.

    Args:
        values: [..., N] floats; no row is all zeros.

    Returns int8 steps of the same shape, and the step's size, [..., 1] of the values' dtype.
    """
    scale = values.abs().amax(dim=-1, keepdim=True) / STEPS
    return (values / scale).round().to(torch.int8), scale


def make_int8(model_path: Path, directory: Path) -> None:
    """Write the model in ``model_path`` to ``directory``, its layers' matrices in 8 bits.

    Raises:
        ConfigError: ``directory`` holds something, or the model is no llama in one file.
        ResourceError: it cannot be written.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((model_path / "config.json").read_text())
    if config["model_type"] != "llama" or not (model_path / WEIGHTS).exists():
        raise ConfigError(f"make-model: {model_path} is no llama with a {WEIGHTS}")
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model_path / WEIGHTS).items():
        if name.endswith("_proj.weight"):
            steps, scale = rounded(weight.float())
            weights[name] = steps
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = weight

    def write(scratch: Path) -> None:
        for file in model_path.iterdir():
            if file.is_file() and file.name != WEIGHTS:
                shutil.copyfile(file, scratch / file.name)
        text = json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2)
        (scratch / "config.json").write_text(text + "\n")
        save_file(weights, scratch / WEIGHTS, metadata={"format": "pt"})

    place(directory, sum(weight.nbytes for weight in weights.values()), write)


@torch.no_grad()
def perplexities(model_path: Path, text: str) -> tuple[float, float]:
    """Perplexity of ``text`` to the model in ``model_path``, and to the same in 8 bits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    before = _perplexity(model, tokens)
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.weight.copy_(_as_stored(layer.weight))
            layer.register_forward_pre_hook(lambda _, inputs: (_as_stored(inputs[0]),))
    return before, _perplexity(model, tokens)


def _as_stored(values: torch.Tensor) -> torch.Tensor:
    steps, scale = rounded(values)
    return steps.to(values.dtype) * scale


def _perplexity(model: Any, tokens: torch.Tensor) -> float:
    """Perplexity of ``tokens``, [1, N] int64."""
    windows = tokens.split(WINDOW, dim=1)
    losses = [
        (model(window, labels=window).loss, window.shape[1] - 1)
        for window in windows
        if window.shape[1] > 1
    ]
    total = sum(float(loss) * count for loss, count in losses)
    return float(torch.tensor(total / sum(count for _, count in losses)).exp())


def main() -> None:
    """Make a checkpoint, and print what it costs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_model.int8", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT, help="a file (default: corpus.txt)")
    args = parser.parse_args()
    make_int8(args.model, args.directory)
    before, after = perplexities(args.model, args.text.read_text())
    print(f"{args.directory}: perplexity of {args.text.name} {after:.2f}, {before:.2f} before")


if __name__ == "__main__":
    try:
        main()
    except SiPipeError as error:
        sys.exit(str(error))
