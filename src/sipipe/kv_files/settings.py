"""The settings of KVFiles, which are checked before anything starts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sipipe.errors import ConfigError

MODULE = "sipipe.kv_files.connector"
"""The connector's module, as ``kv_connector_module_path`` names it."""
OPTIONS = ("directory", "size_gib")


def check(transfer: Any) -> None:
    """Check the settings of each KVFiles that vLLM's ``KVTransferConfig`` ``transfer`` names; None is no
    connector.

    Raises:
        ConfigError: as :func:`settings`.
    """
    for extra in _named(transfer):
        settings(extra)


def is_used(transfer: Any) -> bool:
    """Say if ``transfer`` names KVFiles."""
    return any(True for _ in _named(transfer))


def _named(transfer: Any) -> Iterator[dict[str, Any]]:
    """The settings of each KVFiles: of the connector itself, or of those that vLLM's ``MultiConnector``
    joins. What is of another kind vLLM refuses."""
    connectors = [] if transfer is None else [vars(transfer)]
    # bound: an object of a JSON text has no circle
    while connectors:
        connector = connectors.pop()
        extra = connector.get("kv_connector_extra_config", {})
        if not isinstance(extra, dict):
            continue
        if connector.get("kv_connector_module_path") == MODULE:
            yield extra
        joined = extra.get("connectors")
        if isinstance(joined, list):
            connectors += [inner for inner in joined if isinstance(inner, dict)]


def settings(extra: dict[str, Any]) -> tuple[Path, int]:
    """The directory, and the bytes that all files in it may have.

    Raises:
        ConfigError: a setting is missing, unknown or of another kind.
    """
    place = "--kv-transfer-config, kv_connector_extra_config"
    if unknown := sorted(set(extra) - set(OPTIONS)):
        raise ConfigError(f"{place}: KVFiles has no {', '.join(unknown)}: {', '.join(OPTIONS)}")
    directory = extra.get("directory")
    if not isinstance(directory, str) or not os.path.isabs(directory):
        raise ConfigError(f'{place}: "directory" has to be an absolute path')
    if not directory.isprintable():  # NUL, and halves of surrogate pairs, are in no path
        raise ConfigError(f'{place}: "directory" has characters that are no text: {directory!r}')
    size = extra.get("size_gib", 10)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < 1 << 20:
        raise ConfigError(f'{place}: "size_gib" has to be a number of GiB above 0')
    return Path(directory), int(size * (1 << 30))
