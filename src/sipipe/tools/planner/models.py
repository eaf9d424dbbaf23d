"""The models that the planner knows by name, and those it reads from a ``config.json``."""

import difflib
import functools
import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.errors import ConfigError


@functools.cache
def builtin_models() -> Mapping[str, Mapping[str, Any]]:
    """The table of ``models.toml``: short name to repository, config fields and published size."""
    return tomllib.loads(files("sipipe.tools.planner").joinpath("models.toml").read_text("utf-8"))


def load_model(model: str, *, weight_bits: float | None = None) -> ModelFacts:
    """Facts of a built-in name, its repository name, a ``config.json``, a model directory, or a
    repository in the Hugging Face cache. Raises ConfigError: none of these. UnsupportedError: the
    performance model does not describe it."""
    try:
        path = Path(model).expanduser()
        is_file = path.is_dir() or path.suffix == ".json" or path.is_file()
    except (OSError, RuntimeError) as error:  # no such user, not to be searched, too long
        raise ConfigError(f"MODEL: {str(error)[:200]}") from None
    if is_file:
        return _from_file(path, model if path.is_dir() else str(path.parent), weight_bits)
    wanted = model.lower()
    for name, entry in builtin_models().items():
        repository = str(entry["repository"]).lower()
        if wanted in (name, repository, repository.rpartition("/")[2]):
            return facts_from_config(
                entry["config"],
                name=str(entry["repository"]),
                source=f"built-in: {entry['source']}",
                weight_bits=weight_bits,
            )
    if (cached := _in_cache(model)) is not None:
        return _from_file(Path(cached), model, weight_bits)
    known = list(builtin_models())
    near = difflib.get_close_matches(wanted.rpartition("/")[2], known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"MODEL: {model!r} is neither a directory or config.json nor a built-in model{hint} "
        f"(built-in: {', '.join(known)})"
    )


def _in_cache(repository: str) -> str | None:
    """Path of a repository's config.json, where it was downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repository, "config.json")
    except (ImportError, ValueError):  # not installed (vLLM brings it); not a repository's name
        return None
    return path if isinstance(path, str) else None


def _from_file(path: Path, name: str, weight_bits: float | None) -> ModelFacts:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"MODEL: cannot read {file}: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"MODEL: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"MODEL: {file} must hold a JSON object")
    return facts_from_config(config, name=name, source=str(file), weight_bits=weight_bits)
