"""What is wrong with a checkpoint on this machine, seen before a process loads it.

Only what is surely wrong is refused: a name may be one on the hub, other files a model's own.
"""

import difflib
import errno
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import safetensors
from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from vllm import envs
from vllm.config import VllmConfig
from vllm.tokenizers import TokenizerRegistry

from sipipe.errors import ConfigError

CONFIGS = ("config.json", "params.json", "*.gguf", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken*", "merges*", "*.gguf")
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""What training leaves behind."""
FILES = ("auto", "hf", "safetensors", "pt", "npcache", "mistral")
"""Load formats that read files of the model's directory."""


def check_model(model: str) -> None:
    """Refuse a path to nothing, and a directory of something else. Raises ConfigError."""
    check_path(model, "MODEL")
    _check(Path(model), CONFIGS, f'MODEL "{model}"', "config.json of a model")


def check_path(model: str, option: str) -> None:
    """Refuse a path to nothing, of which the hub would be asked. Raises ConfigError: it names it."""
    path = Path(model)
    try:
        found = path.exists()
        if found and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:  # or above it is what may not be looked into, or its name is too long
        raise ConfigError(f'{option} "{model}" cannot be read: {error.strerror}') from None
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not found:
        raise ConfigError(f'{option} "{model}": there is no such directory{_meant(path)}')


def _meant(path: Path) -> str:
    beside: list[str] = []
    with suppress(OSError):  # it is not there, or may not be listed
        beside = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f'; did you mean "{path.parent / near[0]}"?' if near else ""


def ask_hub(model: str) -> None:
    """Ask the hub once for what may be a name there, or a path's of which only the end is wrong: to
    read it, it would be asked for a minute. Raises OSError: it is neither."""
    path, name = Path(model), model.partition(":")[0]
    kept = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    elsewhere = path.exists() or kept.exists() or envs.VLLM_USE_MODELSCOPE
    if elsewhere or model.count("/") != 1 or not path.parent.is_dir():
        return
    try:
        model_info(name, timeout=10)
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and type(error) is not RepositoryNotFoundError:
            return  # it may be there all the same
        missing = f"there is no such directory, nor was it found on the hub{_meant(path)}"
        raise OSError(missing) from error


def check_files(vllm_config: VllmConfig) -> None:
    """Refuse files that are missing or half, and what vLLM cannot read. Raises ConfigError."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in (*FILES, "dummy"):
        from vllm.model_executor.model_loader import get_model_loader  # a second

        _check_reader("--load-format", str(load.load_format), lambda _: get_model_loader(load))
    if model.tokenizer_mode != "auto":
        mode = str(model.tokenizer_mode)
        _check_reader("--tokenizer-mode", mode, TokenizerRegistry.load_tokenizer_cls)
    if model.model_weights:  # in an object store; the directory has the rest of it
        return
    if load.load_format in FILES:
        _check(Path(model.model), WEIGHTS, f'MODEL "{model.model}"', "weights (*.safetensors)")
        _check_shards(Path(model.model), str(load.load_format))
    if not model.skip_tokenizer_init:
        where = str(model.tokenizer)
        check_path(where, "--tokenizer")
        _check(Path(where), TOKENIZERS, f'--tokenizer "{where}"', "tokenizer")


def _check_reader(option: str, name: str, find: Callable[[str], object]) -> None:
    try:
        find(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f'{option} "{name}": {error}') from error


def _check(folder: Path, patterns: Iterable[str], name: str, what: str) -> None:
    # Not deeper: it may be anything, a file server's root among them.
    places = [place + pattern for pattern in patterns for place in ("", "*/")]
    if folder.is_dir() and not any(any(folder.glob(place)) for place in places):
        raise ConfigError(f"{name}: there is no {what} in it: name another, or download it again")


def _check_shards(folder: Path, load_format: str) -> None:
    files = weight_files(folder, load_format)
    for shard in sorted(file for file in files if file.suffix == ".safetensors"):
        try:
            safetensors.safe_open(shard, "np")  # which reads what is where in it
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f'MODEL: "{shard}" is not there or not whole: download it again ({error})'
            ) from None


def weight_files(folder: Path, load_format: str) -> set[Path]:
    """As vLLM picks them: Mistral's own files first, and those that an index names."""
    name, shards = "consolidated", set(folder.glob("consolidated*.safetensors"))
    if load_format not in ("auto", "mistral") or not shards:
        name, shards = "model", set(folder.glob("*.safetensors"))
    if not shards or load_format in ("pt", "npcache"):
        others = () if load_format == "pt" else folder.glob("*.bin")
        found = set(others) or set(folder.glob("*.pt"))
        return {file for file in found if not file.name.endswith(NO_WEIGHTS)}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no index
        index = json.loads((folder / f"{name}.safetensors.index.json").read_bytes())
        shards = {folder / shard for shard in index["weight_map"].values()}
    return shards


def weight_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the model's files of weights: in a directory, or what the hub's cache has of them. 0
    where they are not on this machine yet."""
    model, load = vllm_config.model_config, vllm_config.load_config
    folder = Path(model.model)
    with suppress(OSError, ValueError):  # nothing of it is there, or it is no hub's name
        if not folder.exists():
            places = {"revision": model.revision, "cache_dir": load.download_dir}
            folder = Path(snapshot_download(model.model, **places, local_files_only=True))
    files = weight_files(folder, str(load.load_format))
    return sum(file.stat().st_size for file in files if file.exists())
