"""Checkpoints that are stored by rank (``--load-format sharded_state``), seen before a process loads one.

Each rank of each stage has files of its own, in which layers keep the numbers that they have in the
whole model. So the files say how the model was cut, and no other cut can load them.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

import safetensors
from vllm.config import VllmConfig

from sipipe.errors import ConfigError

FORMATS = ("sharded_state", "runai_streamer_sharded")
"""vLLM's load formats that read files by rank."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def stored_cut(vllm_config: VllmConfig) -> tuple[int, ...] | None:
    """Decoder layers of each stage as a checkpoint by rank has them; None for other formats, and where
    not all stages' files are on this host. Raises ConfigError: what is here fits no cut, or other
    numbers of stages and ranks."""
    if not _by_rank(vllm_config):
        return None
    parallel = vllm_config.parallel_config
    stages = int(parallel.pipeline_parallel_size)
    ranks = int(parallel.tensor_parallel_size)
    _check_size(vllm_config, stages, ranks)
    files = [_files(vllm_config, stage, rank=0) for stage in range(stages)]
    if not all(files):
        return None
    numbers = [_layers(each) for each in files]
    total = vllm_config.model_config.get_total_num_hidden_layers()
    if any(not each for each in numbers) and not any(numbers):
        return None  # names of another kind
    if [layer for each in numbers for layer in sorted(each)] != list(range(total)):
        counts = ", ".join(str(len(each)) for each in numbers)
        raise ConfigError(
            f'MODEL "{vllm_config.model_config.model}": its files by rank have {counts} layers in '
            f"stages 0 to {stages - 1}, which are not the model's {total} in order: store it anew for "
            f"--pipeline-parallel-size {stages}, or serve it with the number that it was stored for"
        )
    return tuple(len(each) for each in numbers)


def check_rank_files(vllm_config: VllmConfig, here: Iterable[int]) -> None:
    """Refuse a checkpoint by rank that lacks files of the stages ``here``, or has one that is not
    whole. Raises ConfigError: it names the file."""
    if not _by_rank(vllm_config):
        return
    parallel = vllm_config.parallel_config
    for stage in here:
        for rank in range(parallel.tensor_parallel_size):
            found = _files(vllm_config, stage, rank)
            if not found:
                raise ConfigError(
                    f'MODEL "{vllm_config.model_config.model}": there is no '
                    f"{_pattern(vllm_config, stage, rank)} in it, which rank {rank} of stage {stage} "
                    "loads (--load-format): store it for as many stages and ranks, or serve it with "
                    "the --pipeline-parallel-size and --tensor-parallel-size that it was stored for"
                )
            for file in found:
                _open(file)


def _by_rank(vllm_config: VllmConfig) -> bool:
    """Whether files by rank are read from a directory of this host, by names that are known."""
    load, model = vllm_config.load_config, vllm_config.model_config
    directory = not model.model_weights and Path(model.model).is_dir()
    return load.load_format in FORMATS and directory and bool(_pattern(vllm_config, 0, 0))


def _pattern(vllm_config: VllmConfig, stage: int | str, rank: int | str) -> str:
    """Names of the files of a rank, as vLLM's loader makes them; empty where it refuses to."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader  # a second

    several = vllm_config.parallel_config.pipeline_parallel_size > 1
    default = (
        ShardedStateLoader.PP_AND_TP_PATTERN if several else ShardedStateLoader.TP_ONLY_PATTERN
    )
    extra = vllm_config.load_config.model_loader_extra_config or {}
    pattern = (extra.get("pattern") if isinstance(extra, dict) else None) or default
    try:
        return str(pattern.format(pp_rank=stage, tp_rank=rank, rank=rank, part="*"))
    except (LookupError, ValueError, AttributeError):
        return ""  # the loader says what is wrong with it


def _files(vllm_config: VllmConfig, stage: int | str, rank: int | str) -> list[str]:
    folder = glob.escape(vllm_config.model_config.model)
    return sorted(glob.glob(os.path.join(folder, _pattern(vllm_config, stage, rank))))


def _check_size(vllm_config: VllmConfig, stages: int, ranks: int) -> None:
    """Refuse what was stored for more ranks: each would load a part of what is its own."""
    for option, more in (
        ("--tensor-parallel-size", _files(vllm_config, 0, ranks)),
        ("--pipeline-parallel-size", _files(vllm_config, stages, 0) if stages > 1 else []),
    ):
        if more:
            raise ConfigError(
                f'MODEL "{vllm_config.model_config.model}" was stored for a larger {option}: '
                f'"{Path(more[0]).name}" is in it; serve it with that, or store it anew'
            )


def _layers(files: Iterable[str]) -> set[int]:
    """Numbers of the layers that files have weights of."""
    return {
        int(match[1])
        for file in files
        for name in _open(file)
        if (match := _LAYER.search(name)) is not None
    }


def _open(file: str) -> list[str]:
    """Names of the tensors in a file. Raises ConfigError: it is not whole."""
    try:
        with safetensors.safe_open(file, "np") as opened:
            return list(opened.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(
            f'MODEL: "{file}" is not there or not whole: store it again ({error})'
        ) from None
