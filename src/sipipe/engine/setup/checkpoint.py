"""Checks of a checkpoint on this machine, before a process loads it.

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
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.tokenizers import TokenizerRegistry

from sipipe.errors import ConfigError

# A model's directory has a file of each of these three kinds.
CONFIGS = ("config.json", "params.json", "*.gguf", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken*", "merges*", "*.gguf")

NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Ends of the names of files that a training leaves behind: its state, not the model's weights."""

FILES = ("auto", "hf", "safetensors", "pt", "npcache", "mistral")
"""Load formats that read files of the model's directory."""


def check_model(model: str) -> None:
    """Refuse a path to nothing, and a directory of something else. Raises ConfigError."""
    check_path(model, "MODEL")
    _check(Path(model), CONFIGS, f'MODEL "{model}"', "config.json of a model")


def check_path(model: str, option: str) -> None:
    """Refuse a path to nothing, which the hub would be asked for. Raises ConfigError: it names
    ``option`` and the path."""
    path = Path(model)
    try:
        exists = path.exists()
        if exists:
            needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
            if not os.access(path, needed):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (
        OSError
    ) as error:  # also of a directory above that may not be entered, or a name too long
        raise ConfigError(f'{option} "{model}" cannot be read: {error.strerror}') from None
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not exists:
        raise ConfigError(f'{option} "{model}": there is no such directory{_suggestion(path)}')


def _suggestion(path: Path) -> str:
    """Clause that names an entry of the same directory with a similar name; empty if there is none."""
    names: list[str] = []
    with suppress(OSError):  # the directory is not there, or may not be listed
        names = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f'; did you mean "{path.parent / near[0]}"?' if near else ""


def ask_hub(model: str) -> None:
    """Ask the hub once for a name that may be there, or may be a path of which only the end is wrong.
    vLLM would ask for a minute. Raises OSError: there is neither."""
    path = Path(model)
    name = model.partition(":")[0]
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if path.exists() or cached.exists() or envs.VLLM_USE_MODELSCOPE:
        return
    if model.count("/") != 1 or not path.parent.is_dir():
        return  # it cannot be meant as a path
    try:
        model_info(name, timeout=10)
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and type(error) is not RepositoryNotFoundError:
            return  # the hub has answered something else, and may have the model all the same
        raise OSError(
            f"there is no such directory, nor was it found on the hub{_suggestion(path)}"
        ) from error


def check_files(vllm_config: VllmConfig) -> None:
    """Refuse files that are missing or half, and what vLLM cannot read. Raises ConfigError."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    if load.load_format not in (*FILES, "dummy"):
        # Imported here because it takes a second.
        from vllm.model_executor.model_loader import get_model_loader

        _check_reader("--load-format", str(load.load_format), lambda _: get_model_loader(load))
    if model.tokenizer_mode != "auto":
        mode = str(model.tokenizer_mode)
        _check_reader("--tokenizer-mode", mode, TokenizerRegistry.load_tokenizer_cls)
    if model.model_weights:  # an object store has all files, and the directory some of them
        return
    if load.load_format in FILES:
        _check(Path(model.model), WEIGHTS, f'MODEL "{model.model}"', "weights (*.safetensors)")
        _check_shards(Path(model.model), str(load.load_format))
    if not model.skip_tokenizer_init:
        tokenizer = str(model.tokenizer)
        check_path(tokenizer, "--tokenizer")
        _check(Path(tokenizer), TOKENIZERS, f'--tokenizer "{tokenizer}"', "tokenizer")


def _check_reader(option: str, name: str, load: Callable[[str], object]) -> None:
    """Refuse a ``name`` that vLLM has no reader for, given with ``option``. Raises ConfigError."""
    try:
        load(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f'{option} "{name}": {error}') from error


def _check(folder: Path, patterns: Iterable[str], name: str, content: str) -> None:
    """Refuse a directory without a file of these ``patterns``, in it or in one of its directories.
    Raises ConfigError: it names the directory by ``name``, and the ``content`` that is missing."""
    if not folder.is_dir():
        return  # it may be a name on the hub
    for pattern in patterns:
        # Not deeper: the directory may be anything, a file server's root among others.
        if any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}")):
            return
    raise ConfigError(f"{name}: there is no {content} in it: name another, or download it again")


def _check_shards(folder: Path, load_format: str) -> None:
    """Refuse safetensors files that are not there or not whole. Raises ConfigError: it names one."""
    files = weight_files(folder, load_format)
    for shard in sorted(file for file in files if file.suffix == ".safetensors"):
        try:
            safetensors.safe_open(shard, "np")  # reads the file's table of tensors
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f'MODEL: "{shard}" is not there or not whole: download it again ({error})'
            ) from None


def weight_files(folder: Path, load_format: str) -> set[Path]:
    """The files of weights in ``folder`` that vLLM loads: Mistral's own first, and of those in
    safetensors the ones that an index names."""
    shards: set[Path] = set()
    if load_format in ("auto", "mistral"):
        shards = set(folder.glob("consolidated*.safetensors"))
    name = "consolidated"
    if not shards:
        name = "model"
        shards = set(folder.glob("*.safetensors"))
    if not shards or load_format in ("pt", "npcache"):
        return _torch_files(folder, load_format)
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # there is no index
        index = json.loads((folder / f"{name}.safetensors.index.json").read_bytes())
        shards = {folder / shard for shard in index["weight_map"].values()}
    return shards


def _torch_files(folder: Path, load_format: str) -> set[Path]:
    """The files of weights in ``folder`` that torch has pickled, less those of a training's state."""
    files: set[Path] = set()
    if load_format != "pt":
        files = set(folder.glob("*.bin"))
    if not files:
        files = set(folder.glob("*.pt"))
    return {file for file in files if not file.name.endswith(NO_WEIGHTS)}


def weight_bytes(model: ModelConfig, load: LoadConfig) -> int:
    """Bytes of a model's files of weights: in a directory, or what the hub's cache has of them. 0
    where they are not on this machine yet."""
    folder = Path(model.model)
    with suppress(OSError, ValueError):  # the cache has nothing of it, or it is no hub's name
        if not folder.exists():
            snapshot = snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=load.download_dir,
                local_files_only=True,
            )
            folder = Path(snapshot)
    files = weight_files(folder, str(load.load_format))
    return sum(file.stat().st_size for file in files if file.exists())
