"""Values of vLLM's environment variables, checked before anything starts.

vLLM reads some of them when it is imported, others in its engine process and in its workers, half a
minute later: a traceback that ends in ``could not convert string to float``. Its table of
variables is read here without an import of vLLM, which would be the first to fail.
"""

import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from logging.config import BaseConfigurator
from pathlib import Path
from types import ModuleType

from sipipe.errors import ConfigError

METRICS = "PROMETHEUS_MULTIPROC_DIR"
LOG_LEVEL = "VLLM_LOGGING_LEVEL"
LOG_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
LOG_STREAM = "VLLM_LOGGING_STREAM"
LOG_PREFIX = "VLLM_LOGGING_PREFIX"
SOCKETS = "VLLM_RPC_BASE_PATH"

BOUNDS = {
    "VLLM_PORT": (0, 65535),
    "VLLM_DP_MASTER_PORT": (0, 65535),
    "VLLM_ENGINE_READY_TIMEOUT_S": (1, 10**6),
    "VLLM_MEDIA_LOADING_THREAD_COUNT": (1, 10**4),
    "VLLM_MAX_N_SEQUENCES": (1, 10**9),
}
"""Numbers that vLLM takes as they are, and fails with where it uses them: while it is imported, at the
end of a start, or at the first request."""
LONGEST_SOCKET = 107
"""Bytes of a socket's path that the kernel takes."""
SOCKET_NAME = 37
"""Bytes that vLLM adds to the directory's path: a slash and 36 characters."""


def check_environment() -> None:
    """Read each of vLLM's environment variables that is set. Raises ConfigError, which names it."""
    conversions = _conversions()
    # Not all of them: reading one that is not set may set it (the name of a shared buffer).
    for name in sorted(os.environ.keys() & conversions.keys()):
        try:
            value = conversions[name]()
        except Exception as error:  # whatever its conversion raises
            raise ConfigError(environment_error(name, error)) from None
        least, most = BOUNDS.get(name, (-math.inf, math.inf))
        if isinstance(value, int) and not least <= value <= most:
            raise ConfigError(f'{name}="{value}" must be from {least} to {most}')
    _check_logging()
    for name in (METRICS, SOCKETS):
        _check_directory(name)
    longest = LONGEST_SOCKET - SOCKET_NAME
    if len(os.fsencode(os.environ.get(SOCKETS, ""))) > longest:
        raise ConfigError(f"{SOCKETS} is too long for a socket's path: {longest} bytes at most")


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


def _check_directory(name: str) -> None:
    """Refuse a directory, if the variable ``name`` has one, that cannot be written to."""
    directory = os.environ.get(name)
    if directory is not None and not (
        os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)
    ):
        raise ConfigError(f'{name}="{directory}" is no directory that can be written to')


def _check_logging() -> None:
    """Refuse a level, file, stream or prefix that vLLM's logger cannot use; its conversions take any
    text."""
    level = os.environ.get(LOG_LEVEL)
    if level is not None and level.upper() not in logging.getLevelNamesMapping():
        levels = ", ".join(("DEBUG", "INFO", "WARNING", "ERROR"))
        raise ConfigError(f'{LOG_LEVEL}="{level[:60]}" is no level: {levels}')
    path = os.environ.get(LOG_CONFIG)
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f'{LOG_CONFIG}="{path}" cannot be read')
    if path is not None and not _is_object(path):
        raise ConfigError(f'{LOG_CONFIG}="{path}" is no JSON object')
    stream = os.environ.get(LOG_STREAM)
    if stream is not None and not _is_stream(stream):
        raise ConfigError(f'{LOG_STREAM}="{stream}" is no stream: ext://sys.stdout or such')
    prefix = os.environ.get(LOG_PREFIX)
    if prefix is not None and not _formats(prefix):
        raise ConfigError(f'{LOG_PREFIX}="{prefix}" is no format of logging: write %% for a %')


def _is_object(path: str) -> bool:
    try:
        return isinstance(json.loads(Path(path).read_text("utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _is_stream(text: str) -> bool:
    """Say if the handler of vLLM's logger can write to what ``text`` names."""
    try:
        return hasattr(BaseConfigurator({}).convert(text), "write")
    except (ValueError, ImportError, AttributeError):
        return False


def _formats(prefix: str) -> bool:
    """Say if lines can be formatted with ``prefix`` in front."""
    record = logging.LogRecord("vllm", logging.INFO, "", 0, "", None, None)
    record.vllm_process_name = record.fileinfo = ""  # what vLLM adds to each
    try:
        logging.Formatter(f"{prefix}%(message)s").format(record)
    except (ValueError, TypeError, KeyError):
        return False
    return True
