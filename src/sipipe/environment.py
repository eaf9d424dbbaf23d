"""Values of vLLM's environment variables, checked before anything starts.

vLLM reads some of them when it is imported, others in its engine process and in its workers, half a
minute later: a traceback that ends in ``could not convert string to float``. Its table of
variables is read here without an import of vLLM, which would be the first to fail.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from sipipe.errors import ConfigError

METRICS = "PROMETHEUS_MULTIPROC_DIR"
LOG_LEVEL = "VLLM_LOGGING_LEVEL"
LOG_CONFIG = "VLLM_LOGGING_CONFIG_PATH"


def check_environment() -> None:
    """Read each of vLLM's environment variables that is set. Raises ConfigError, which names it."""
    conversions = _conversions()
    # Not all of them: reading one that is not set may set it (the name of a shared buffer).
    for name in sorted(os.environ.keys() & conversions.keys()):
        try:
            conversions[name]()
        except Exception as error:  # whatever its conversion raises
            raise ConfigError(environment_error(name, error)) from None
    _check_logging()
    directory = os.environ.get(METRICS)
    if directory is not None and not (
        os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)
    ):
        raise ConfigError(f'{METRICS}="{directory}" is no directory that can be written to')


def environment_error(name: str, error: Exception) -> str:
    """The line for a variable whose value vLLM cannot read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    value = os.environ.get(name)
    return f"{name}: {reason}" if value is None else f'{name}="{value[:60]}": {reason}'


def _conversions() -> Mapping[str, Callable[[], object]]:
    """Return vLLM's conversion of each variable by its name, from the module ``vllm.envs``, which
    imports nothing else of vLLM. Empty where another version of vLLM has no such table."""
    try:
        module = _environment_module()
    except Exception:  # whatever another version's code raises; vLLM says it itself when it is used
        return {}
    conversions: Mapping[str, Callable[[], object]] = getattr(module, "environment_variables", {})
    return conversions


def _environment_module() -> ModuleType:
    if "vllm.envs" in sys.modules:
        return sys.modules["vllm.envs"]
    # ``find_spec`` of a submodule would import vLLM; of the package it does not.
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "envs.py"
    spec = importlib.util.spec_from_file_location("_vllm_envs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_logging() -> None:
    """Refuse a level or file that vLLM's logger cannot use; its conversions take any text."""
    level = os.environ.get(LOG_LEVEL)
    if level is not None and level.upper() not in logging.getLevelNamesMapping():
        levels = ", ".join(("DEBUG", "INFO", "WARNING", "ERROR"))
        raise ConfigError(f'{LOG_LEVEL}="{level[:60]}" is no level: {levels}')
    path = os.environ.get(LOG_CONFIG)
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f'{LOG_CONFIG}="{path}" cannot be read')
