"""The storage that servers share their KV caches by (``KVFiles``): full, read-only, taken away.

A prompt is stored and loaded where that works, and computed where it does not: tokens are those of a
server that computes them. When the storage is back, prompts are loaded from it again. The storage is a
file system in memory, of a few MiB; it needs root.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.served import Clients, Row, scratch_directory, server_options

FULL = "the storage of KV caches is full"
READ_ONLY = "the storage of KV caches is read-only"
AWAY = "the storage of KV caches is taken away"
KINDS = {FULL: 8, READ_ONLY: 8, AWAY: 4}
"""How often each; in between the storage is as it should be."""
LOADED = "vllm:external_prefix_cache_hits_total"
"""vLLM's count of prompt tokens that a connector loaded."""


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """A row of the table for each kind whose name matches ``only``."""
    names = [name for name in KINDS if re.search(only, name)]
    if not names:
        return []
    from tests.engine.engines import model
    from tests.engine.servers import Server

    rows = []
    with scratch_directory() as scratch:
        path = model(scratch)
        storage = scratch / "storage"
        storage.mkdir()
        connector = {
            "kv_connector": "KVFiles",
            "kv_connector_module_path": "sipipe.kv_files.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"directory": str(storage), "size_gib": 1},
        }
        options = ["--kv-transfer-config", json.dumps(connector), "--block-size", "32"]
        options += server_options()
        resets = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        _mount(storage)
        try:
            with Server(path, scratch / "log", *options, temporary=scratch, more=resets) as server:
                for name in names:
                    row = Row(name)
                    rng = Random(f"{seed} {name}")
                    for number in range(max(1, round(KINDS[name] * scale))):
                        clients = Clients(6, rng.randrange(1 << 30), longest=150)
                        _round(row, server, storage, clients, stored=number % 2 == 1)
                    rows.append(row.finished())
                    each(name, rows[-1]["injected"], rows[-1]["why"])
        finally:
            subprocess.run(["umount", "-l", storage], check=False)
    return rows


def _round(row: Row, server: Any, storage: Path, clients: Clients, *, stored: bool) -> None:
    """One fault. ``stored``: the prompts were stored before, and cannot be loaded; otherwise they
    cannot be stored."""
    from tests.engine.servers import health, metric

    if stored:
        clients.learn(server.address)
    _strike(row.kind, storage)
    if not stored:
        clients.learn(server.address)
    verdicts = []
    # The engine's own cache is emptied before each, or it would never look into the storage.
    for _ in range(2):
        _forget(server)
        verdicts.append(clients.verdict(server.address))
    _restore(row.kind, storage)
    for _ in range(2):
        loaded = metric(server.address, LOADED)
        _forget(server)
        verdicts.append(clients.verdict(server.address))
    bad = [verdict for verdict in verdicts if verdict != "recovered"]
    if health(server.address) != 200:
        row.add("unclear", server.log.read_text()[-800:])
    elif bad:
        row.add(bad[0], server.log.read_text()[-800:])
    elif metric(server.address, LOADED) == loaded:
        row.add("unclear", "nothing was loaded when the storage was back")
    else:
        row.add("recovered")


def _forget(server: Any) -> None:
    from tests.engine.servers import wait_until

    def reset() -> bool:
        asked = urllib.request.Request(f"{server.address}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return bool(json.load(answer)["success"])

    wait_until(reset, seconds=60)


def _mount(storage: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", storage], check=True)


def _strike(kind: str, storage: Path) -> None:
    if kind == FULL:
        try:
            with (storage / "full").open("wb", buffering=0) as file:
                while file.write(bytes(1 << 12)):
                    pass
        except OSError:
            return
    elif kind == READ_ONLY:
        subprocess.run(["mount", "-o", "remount,ro", storage], check=True)
    else:
        subprocess.run(["umount", "-l", storage], check=True)
        shutil.rmtree(storage)
        storage.write_text("a file where the directory was")


def _restore(kind: str, storage: Path) -> None:
    if kind == FULL:
        (storage / "full").unlink()
    elif kind == READ_ONLY:
        subprocess.run(["mount", "-o", "remount,rw", storage], check=True)
    else:
        storage.unlink()
        storage.mkdir()
        _mount(storage)
