"""The settings of KVFiles, which are checked before anything starts."""

import os
from pathlib import Path
from typing import Any

from sipipe.errors import ConfigError

MODULE = "sipipe.kv_files.connector"
"""The connector's module, as ``kv_connector_module_path`` names it."""
OPTIONS = ("directory", "size_gib")


def check(module: str | None, extra: Any) -> None:
    """Check the settings of each KVFiles in ``--kv-transfer-config``, which has this ``module`` and
    ``extra``: its own, and those of connectors that vLLM's ``MultiConnector`` joins.

    Raises:
        ConfigError: as :func:`settings`.
    """
    if not isinstance(extra, dict):
        return  # vLLM says so
    if module == MODULE:
        settings(extra)
    connectors = extra.get("connectors")
    for connector in connectors if isinstance(connectors, list) else ():
        if isinstance(connector, dict):
            inner = connector.get("kv_connector_extra_config", {})
            check(connector.get("kv_connector_module_path"), inner)


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


def is_used(transfer: Any) -> bool:
    """Say if vLLM's ``KVTransferConfig`` ``transfer`` names KVFiles, alone or among several connectors.
    None is no connector."""
    if transfer is None:
        return False
    if transfer.kv_connector_module_path == MODULE:
        return True
    connectors = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(connectors, list):  # vLLM says what is wrong with anything else
        return False
    return any(
        isinstance(connector, dict) and connector.get("kv_connector_module_path") == MODULE
        for connector in connectors
    )
