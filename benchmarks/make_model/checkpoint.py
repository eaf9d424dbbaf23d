"""Writes a whole checkpoint directory: config, weights, tokenizer, generation config.

Weights are random, drawn so that outputs can be told apart. Every matrix has variance 1 / fan-in
and so keeps the scale of its normalised inputs: the next token depends on the whole context. Logits
have a standard deviation of about ``LOGITS_STD``, so that greedy choices are clear and temperature,
top-k, top-p and min-p all have something to cut.
"""

import dataclasses
import io
import json
import math
import os
import shutil
import zlib
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.make_model.families import FAMILIES, MIXTURES, SIZES, Shape
from benchmarks.make_model.tokenizer import write_tokenizer
from sipipe.errors import ConfigError
from sipipe.tools.smollm2 import place

LOGITS_STD = 3.0

_BLOCK = 1 << 22
"""Elements drawn at a time: 16 MiB of float32."""

RECIPE_FILE = "sipipe_model.json"
"""What a checkpoint was made from; a second call with the same recipe has nothing to do."""

RECIPE_VERSION = 3
"""Raised when the same arguments begin to give other files."""


def make_model(
    family: str,
    directory: str | os.PathLike[str],
    *,
    size: str = "tiny",
    seed: int = 0,
    dtype: str | None = None,
    **sizes: int,
) -> Path:
    """Write a random, deterministic checkpoint of ``family`` to ``directory`` and return it.

    A checkpoint made with the same arguments is left as it is; one made with others is replaced.

    Args:
        family: one of :data:`benchmarks.make_model.families.FAMILIES`.
        size: one of :data:`benchmarks.make_model.families.SIZES`.
        seed: of the weights, 0 or more.
        dtype: ``float32``, ``float16`` or ``bfloat16``; None: the size's own.
        sizes: fields of :class:`~benchmarks.make_model.families.Shape` that differ from the size's.

    Raises:
        ConfigError: an argument has a bad value, or ``directory`` holds something else.
        ResourceError: the disk is too full.
    """
    for name, known in ((family, FAMILIES), (size, SIZES)):
        if name not in known:
            raise ConfigError(f'make-model: unknown "{name}" (known: {", ".join(known)})')
    shape = dataclasses.replace(SIZES[size], **sizes)
    if family in MIXTURES and not shape.moe_intermediate:
        raise ConfigError(f'make-model: size "{size}" is dense, and {family} a mixture of experts')
    dtype = dtype or shape.dtype
    recipe = {
        "recipe": RECIPE_VERSION,
        "family": family,
        "size": size,
        "seed": seed,
        "dtype": dtype,
        "shape": dataclasses.asdict(shape),
    }
    target = Path(directory)
    made = target / RECIPE_FILE
    if made.exists():
        if json.loads(made.read_text()) == recipe:
            return target
        shutil.rmtree(target)
    model = _empty_model(FAMILIES[family](shape), dtype)
    size_of = sum(tensor.nbytes for tensor in model.state_dict().values())

    def write(scratch: Path) -> None:
        _write(scratch, model, shape, seed)
        (scratch / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")

    place(target, size_of, write)
    return target


def _empty_model(config: dict[str, Any], dtype: str) -> Any:
    """The transformers model of ``config``, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=getattr(torch, dtype)
        )


def _write(directory: Path, model: Any, shape: Shape, seed: int) -> None:
    from transformers import GenerationConfig

    weights = {name: draw(name, empty, seed=seed) for name, empty in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0, do_sample=False)
    with redirect_stderr(io.StringIO()):  # not all of transformers' bars can be told not to show
        model.save_pretrained(directory)
    write_tokenizer(directory, vocab=shape.vocab, max_positions=shape.max_positions)


def draw(name: str, empty: Any, *, seed: int) -> Any:
    """A new torch tensor of the shape and dtype of ``empty``, the tensor ``name`` of a model.

    DeepSeek's correction of the router's scores is float32 whatever the model is. The float32 values that are rounded to its dtype depend on ``seed``, the name and the shape
    alone: the same tensor comes out whatever the element type or the other tensors are.
    """
    import torch

    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    mean, std = _distribution(name, tuple(empty.shape))
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else empty.dtype
    drawn = torch.empty(empty.shape, dtype=dtype)
    for block in drawn.view(-1).split(_BLOCK):
        values = generator.standard_normal(len(block), dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        block.copy_(torch.from_numpy(values))
    return drawn


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's elements."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.01
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    fan_in = shape[-1]  # matrices are [out, in], those of experts [experts, out, in]
    return 0.0, (LOGITS_STD if name == "lm_head.weight" else 1.0) / math.sqrt(fan_in)
