"""What the engine tests share: models, engines in processes of their own, and the oracle."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sipipe.tools.make_model.checkpoint import make_model

HERE = Path(__file__).parent
SECONDS = 300

DEFAULTS = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
}


def model(directory: Path, family: str = "llama", **options) -> Path:
    """The tiny checkpoint of a family, made once in ``directory``."""
    path = directory / "-".join([family, *(f"{k}{v}" for k, v in options.items())])
    if not path.exists():
        make_model(family, path, **options)
    return path


def prompts(count: int, *, vocab: int = 1000, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths, 1 to ``longest`` tokens, deterministic."""
    import random

    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def greedy(count: int, *, shortest: int = 4, longest: int = 24, seed: int = 1) -> list[dict]:
    """Greedy parameters of mixed lengths, so that sequences leave at different times."""
    import random

    rng = random.Random(seed)
    return [
        {"temperature": 0.0, "max_tokens": rng.randint(shortest, longest), "ignore_eos": True}
        for _ in range(count)
    ]


def run_engine(
    model_path, batches, *, sipipe: dict | None = None, env: dict | None = None, **engine
):
    """Run ``batches`` ([{"prompts", "params"}]) through one engine; ``sipipe=None``: stock vLLM.

    Returns the requests of each batch as ``engine_run.py`` prints them. Fails the test with the
    engine's last lines when the process does, and when it leaves a process behind.
    """
    spec = {
        "model": str(model_path),
        "sipipe": sipipe,
        "batches": batches,
        "engine": {**DEFAULTS, **engine},
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "engine_run.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**engine_environment(), **(env or {})},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(json.dumps(spec), timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        text, _ = process.communicate()
        pytest.fail(f"the engine was not done after {SECONDS} s, {_kept(process.pid, text)}")
    found = re.search(r"^RESULT (.*)$", text, re.MULTILINE)
    if process.returncode or not found:
        pytest.fail(f"the engine ended with {process.returncode}, {_kept(process.pid, text)}")
    return json.loads(found.group(1))


def _kept(pid: int, text: str) -> str:
    """Keep the whole log of a failed engine; the lines that say most, for the test's message."""
    path = Path("build/engine-logs") / f"{pid}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    telling = [line for line in text.splitlines() if re.search(r"Error|error:|SiPipe", line)]
    return f"log in {path}:\n" + "\n".join(dict.fromkeys(telling[-20:]))


def engine_environment() -> dict:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def tokens(requests) -> list[list[int]]:
    """Token ids of the first sequence of each request."""
    return [request["outputs"][0]["token_ids"] for request in requests]


@functools.cache
def stock(model_path: str, batches: str, engine: str = "{}"):
    """Stock vLLM at one stage on the same workload, run once per test session."""
    options = json.loads(engine)
    # Its CPU build binds one rank to each NUMA node unless it is told which cores to take.
    cores = sorted(os.sched_getaffinity(0))
    ranks = options.get("tensor_parallel_size", 1)
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    env = {"VLLM_CPU_OMP_THREADS_BIND": bind} if ranks > 1 else None
    return run_engine(model_path, json.loads(batches), env=env, **options)


def stock_tokens(model_path, batches, **engine):
    return stock(str(model_path), json.dumps(batches), json.dumps(engine))
