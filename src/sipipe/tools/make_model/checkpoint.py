"""Writes a whole checkpoint directory: config, weights, tokenizer, generation config.

Weights are random, drawn so that outputs can be told apart. Every matrix has variance 1 / fan-in
and so keeps the scale of its normalised inputs: the next token depends on the whole context. Logits
have a standard deviation of about ``LOGITS_STD``, so that greedy choices are clear and temperature,
top-k, top-p and min-p all have something to cut.
"""

import dataclasses
import difflib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sipipe.errors import ConfigError, ResourceError
from sipipe.tools.make_model import published
from sipipe.tools.make_model.families import FAMILIES, MIXTURES, SIZES, Shape
from sipipe.tools.make_model.tokenizer import MIN_VOCAB, write_tokenizer

Value = TypeVar("Value")

LOGITS_STD = 3.0

_BLOCK = 1 << 22
"""Elements drawn at a time: 16 MiB of float32."""

RECIPE_FILE = "sipipe_model.json"
"""What a checkpoint was made from; a second call with the same recipe has nothing to do."""

RECIPE_VERSION = 3
"""Raised when the same arguments begin to give other files."""

PUBLISHED = "smollm2"
"""The family that is no random one."""

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types and their bytes per element."""


def make_model(
    family: str,
    directory: str | os.PathLike[str],
    *,
    size: str = "tiny",
    seed: int = 0,
    dtype: str | None = None,
    vocab_size: int | None = None,
    layers: int | None = None,
    force: bool = True,
) -> Path:
    """Write a random, deterministic checkpoint of ``family`` to ``directory`` and return it.

    The directory appears at once when it is complete. If it already holds a checkpoint made with
    the same arguments it is left as it is; one made with others is replaced with ``force``;
    anything else in the way is an error.

    Args:
        family: one of :data:`sipipe.tools.make_model.families.FAMILIES`, or ``smollm2``, which is
            trained and has one shape (:mod:`sipipe.tools.make_model.published`).
        size: one of :data:`sipipe.tools.make_model.families.SIZES`.
        seed: of the weights, 0 or more.
        dtype: ``float32``, ``float16`` or ``bfloat16``; None: the size's own.
        vocab_size: rows of the vocabulary; None: the size's own.
        layers: number of layers, 1 or more; None: the size's own.

    Raises:
        ConfigError: an argument has a bad value, or ``directory`` holds something else.
        ResourceError: the disk is too full, or transformers or torch is not installed.
    """
    if family == PUBLISHED:
        return _make_published(Path(directory), dtype or "bfloat16", force)
    config_of = _choose("family", family, FAMILIES)
    shape = _shape(family, size, vocab_size, layers)
    dtype = shape.dtype if dtype is None else dtype
    _choose("--dtype", dtype, DTYPES)
    recipe = {
        "recipe": RECIPE_VERSION,
        "family": family,
        "size": size,
        "seed": seed,
        "dtype": dtype,
        "shape": dataclasses.asdict(shape),
    }
    target = Path(directory)
    if _has_recipe(target, recipe):
        return target
    _check_replaceable(target, force)
    model = _empty_model(config_of(shape), dtype)
    size_of = sum(tensor.numel() for tensor in model.state_dict().values()) * DTYPES[dtype]
    return _place(target, recipe, size_of, lambda scratch: _write(scratch, model, shape, seed))


def _make_published(target: Path, dtype: str, force: bool) -> Path:
    _choose("--dtype", dtype, DTYPES)
    recipe = {"recipe": RECIPE_VERSION, "family": PUBLISHED, "dtype": dtype}
    if _has_recipe(target, recipe):
        return target
    _check_replaceable(target, force)
    source = published.find()
    return _place(
        target,
        recipe,
        published.PARAMETERS * DTYPES[dtype],
        lambda scratch: published.unpack(source, scratch, dtype),
    )


def _place(
    target: Path, recipe: Mapping[str, Any], size: int, write: Callable[[Path], None]
) -> Path:
    """Let ``write`` fill a directory with ``size`` bytes of weights, which then becomes ``target``."""
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
    except OSError as error:
        raise ResourceError(f"make-model: cannot write to {parent}: {error.strerror}") from None
    try:
        _check_space(size, scratch)
        write(scratch)
        (scratch / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")
        for file in scratch.iterdir():
            file.chmod(0o644)  # safetensors keeps its own to the user, mkdtemp the directory
        scratch.chmod(0o755)
        _replace(scratch, target, recipe)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _empty_model(config: Mapping[str, Any], dtype: str) -> Any:
    """The transformers model of ``config``, without memory for its weights."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ResourceError(
            f"make-model builds the model with transformers and torch, and {error.name} is not "
            "installed; both come with vLLM, or: pip install transformers torch"
        ) from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=getattr(torch, dtype)
        )


def _write(directory: Path, model: Any, shape: Shape, seed: int) -> None:
    from transformers import GenerationConfig

    weights = {name: draw(name, empty, seed=seed) for name, empty in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0, do_sample=False)
    with published.without_bars():
        model.save_pretrained(directory)
    write_tokenizer(directory, vocab=shape.vocab, max_positions=shape.max_positions)


def _shape(family: str, size: str, vocab_size: int | None, layers: int | None) -> Shape:
    shape = _choose("--size", size, SIZES)
    if family in MIXTURES and not shape.moe_intermediate:
        fitting = [name for name, other in SIZES.items() if other.moe_intermediate]
        raise ConfigError(
            f'make-model: size "{size}" is a dense shape, and {family} a mixture of experts; '
            f"use --size {' or '.join(fitting)}"
        )
    if vocab_size is not None:
        if vocab_size < MIN_VOCAB:
            raise ConfigError(
                f"make-model: --vocab-size must be {MIN_VOCAB} (every byte and the special "
                f"tokens) or more, not {vocab_size}"
            )
        shape = dataclasses.replace(shape, vocab=vocab_size)
    if layers is not None:
        shape = dataclasses.replace(shape, layers=layers)
    return shape


def _choose(what: str, name: str, among: Mapping[str, Value]) -> Value:
    if name in among:
        return among[name]
    known = [*among, *([PUBLISHED] if what == "family" else [])]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ConfigError(f'make-model: unknown {what} "{name}"{hint} (known: {", ".join(known)})')


def _has_recipe(directory: Path, recipe: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((directory / RECIPE_FILE).read_text()) == recipe)
    except (OSError, ValueError):
        return False


def _check_replaceable(directory: Path, force: bool) -> None:
    if directory.is_dir():
        if not any(directory.iterdir()):
            return
        if (directory / RECIPE_FILE).exists():
            if force:
                return
            raise ConfigError(
                f"make-model: {directory} holds a model made with other arguments; name another "
                "directory, or replace it with --force"
            )
        raise ConfigError(
            f"make-model: {directory} holds files that make-model did not write; "
            "name a new or empty directory"
        )
    if directory.exists():
        raise ConfigError(f"make-model: {directory} is a file; name a new or empty directory")


def _check_space(size: int, directory: Path) -> None:
    needed = size + (16 << 20)  # tokenizer and configuration
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ResourceError(
            f"make-model: the checkpoint needs {needed / 1e6:,.0f} MB and {directory.parent} has "
            f"{free / 1e6:,.0f} MB left; free some space or name another directory"
        )


def _replace(scratch: Path, target: Path, recipe: Mapping[str, Any]) -> None:
    """Move the finished directory into place; another process may do the same just now."""
    for _ in range(3):
        try:
            if target.exists():
                _check_replaceable(target, force=True)
                shutil.rmtree(target)
            scratch.rename(target)
        except OSError:
            if _has_recipe(target, recipe):
                return
        else:
            return
    raise ResourceError(f"make-model: cannot move the finished checkpoint to {target}")


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
