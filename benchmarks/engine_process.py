"""An engine in a process of its own, for benchmarks that compare engines in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["answer", "run_in_process"]

_MARK = "RESULT "


def run_in_process(
    module: str, job: dict[str, Any], *, timeout: float = 900, **environment: str
) -> dict[str, Any]:
    """What ``python -m MODULE --engine JOB`` gives to :func:`answer`.

    ``environment`` stands in for variables that are not set. The process is killed after
    ``timeout`` seconds.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, "--engine", json.dumps(job)],
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            **environment,
            **os.environ,
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    raise SystemExit(f"{module}: the engine process gave no result")


def answer(result: dict[str, Any]) -> None:
    """In that process: hand ``result`` over."""
    print(_MARK + json.dumps(result), flush=True)
