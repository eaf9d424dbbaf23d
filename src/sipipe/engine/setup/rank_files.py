"""Checks of checkpoints that are stored by rank (``--load-format sharded_state``), before a process loads
one.

Each rank of each stage has files of its own, in which layers keep the numbers that they have in the
whole model. So the files say how the model was cut, and no other cut can load them.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import safetensors
from vllm.config import VllmConfig

from sipipe.errors import ConfigError

FORMATS = ("sharded_state", "runai_streamer_sharded")
"""vLLM's load formats that read files by rank."""

_LAYER = re.compile(r"(.*?)\blayers\.(\d+)\.")
"""Part of the model, and number of the layer in it, in the name of a tensor. A model that sees has
layers in its vision tower too."""


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
    numbers = [_layers(files_of_stage) for files_of_stage in files]
    total = vllm_config.model_config.get_total_num_hidden_layers()
    parts = sorted({part for numbers_of_stage in numbers for part in numbers_of_stage})
    cuts = [[sorted(of_stage.get(part, ())) for of_stage in numbers] for part in parts]
    cuts = [layers for layers in cuts if all(layers)]
    if not cuts:
        return None  # the decoder's tensors have names of another kind
    for layers in cuts:
        if list(chain(*layers)) == list(range(total)):
            return tuple(map(len, layers))
    likeliest = max(cuts, key=lambda layers: sum(map(len, layers)))
    counts = ", ".join(str(len(layers_of_stage)) for layers_of_stage in likeliest)
    raise ConfigError(
        f'MODEL "{vllm_config.model_config.model}": its files by rank have {counts} layers in '
        f"stages 0 to {stages - 1}, which are not the model's {total} in order: store it anew for "
        f"--pipeline-parallel-size {stages}, or serve it with the number that it was stored for"
    )


def check_rank_files(vllm_config: VllmConfig, host_stages: Iterable[int]) -> None:
    """Refuse a checkpoint by rank that lacks files of ``host_stages``, or has one that is not
    whole. Raises ConfigError: it names the file."""
    if not _by_rank(vllm_config):
        return
    parallel = vllm_config.parallel_config
    for stage in host_stages:
        for rank in range(parallel.tensor_parallel_size):
            files = _files(vllm_config, stage, rank)
            if not files:
                raise ConfigError(
                    f'MODEL "{vllm_config.model_config.model}": there is no '
                    f"{_pattern(vllm_config, stage, rank)} in it, which rank {rank} of stage {stage} "
                    "loads (--load-format): store it for as many stages and ranks, or serve it with "
                    "the --pipeline-parallel-size and --tensor-parallel-size that it was stored for"
                )
            for file in files:
                _tensor_names(file)


def _by_rank(vllm_config: VllmConfig) -> bool:
    """True if vLLM reads files by rank from a directory of this host, by names that are known."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format not in FORMATS:
        return False
    if model.model_weights or not Path(model.model).is_dir():
        return False  # they are in an object store, or are still to be downloaded
    return bool(_pattern(vllm_config, 0, 0))


def _pattern(vllm_config: VllmConfig, stage: int | str, rank: int | str) -> str:
    """Glob pattern of the files of a rank, by the names that vLLM's loader gives them; empty where the
    user's own pattern makes no names."""
    # Imported here because it takes a second.
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    pattern = ShardedStateLoader.TP_ONLY_PATTERN
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        pattern = ShardedStateLoader.PP_AND_TP_PATTERN
    extra = vllm_config.load_config.model_loader_extra_config
    if isinstance(extra, dict) and extra.get("pattern"):
        pattern = extra["pattern"]
    try:
        return str(pattern.format(pp_rank=stage, tp_rank=rank, rank=rank, part="*"))
    except (LookupError, ValueError, AttributeError):
        return ""  # the loader says what is wrong with the pattern


def _files(vllm_config: VllmConfig, stage: int | str, rank: int | str) -> list[str]:
    """Paths of the files of a rank that are there, in their order."""
    folder = glob.escape(vllm_config.model_config.model)
    return sorted(glob.glob(os.path.join(folder, _pattern(vllm_config, stage, rank))))


def _check_size(vllm_config: VllmConfig, stages: int, ranks: int) -> None:
    """Refuse a checkpoint that was stored for more ranks or stages, of which each rank here would load
    too little. Raises ConfigError."""
    surplus = {"--tensor-parallel-size": _files(vllm_config, 0, ranks)}
    if stages > 1:
        surplus["--pipeline-parallel-size"] = _files(vllm_config, stages, 0)
    for option, files in surplus.items():
        if files:
            raise ConfigError(
                f'MODEL "{vllm_config.model_config.model}" was stored for a larger {option}: '
                f'"{Path(files[0]).name}" is in it; serve it with that, or store it anew'
            )


def _layers(files: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of the layers that files have weights of, by the part of the model that has them."""
    layers: defaultdict[str, set[int]] = defaultdict(set)
    for file in files:
        for name in _tensor_names(file):
            match = _LAYER.match(name)
            if match is not None:
                layers[match[1]].add(int(match[2]))
    return layers


def _tensor_names(file: str) -> list[str]:
    """Names of the tensors in a file. Raises ConfigError: it is not whole."""
    try:
        with safetensors.safe_open(file, "np") as opened:
            return list(opened.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(
            f'MODEL: "{file}" is not there or not whole: store it again ({error})'
        ) from None
