"""``sipipe doctor``: what this machine has, and what SiPipe would do on it.

This process never imports vLLM. A process of its own tries whether vLLM can be imported, because
that takes seconds and may crash.
"""

import ctypes
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from sipipe import cpu_features
from sipipe._version import __version__
from sipipe.cli.advice import best_degrees, gpus_here, quicker_on_cpus
from sipipe.cli.parser import at_least, make_parser
from sipipe.config import STEPS_ASIDE, SiPipeConfig
from sipipe.cores import MOST_PLANNED, cpus_of, format_cpus, plan_cores, quota, this_machine
from sipipe.ipc.memory import free_bytes
from sipipe.linux import pidfd_open
from sipipe.tools.planner.models import load_model
from sipipe.versions import (
    HOW_TO_INSTALL,
    SUPPORTED_VLLM,
    InstalledVllm,
    installed_vllm,
    of_companions,
)

MOST_WORKERS = 8
"""Workers on one core beyond which no plan is shown."""

SECONDS = 120.0
"""Seconds that an import of vLLM may take. One that takes longer counts as broken."""

PRELOADS = {"libtcmalloc": "apt install libtcmalloc-minimal4"}
"""Libraries that vLLM's CPU build advises to preload, each with the way to get it."""
if platform.machine() == "x86_64":
    PRELOADS["libiomp"] = "pip install intel-openmp"

Device = Literal["cpu", "cuda"]


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    state: Literal["ok", "warning", "error"]
    text: str


def main(argv: Sequence[str]) -> int:
    """Print the findings; returns the exit status. 0: SiPipe can run here. 1: it cannot."""
    parser = make_parser("doctor", "What this machine has, and what SiPipe would do on it.")
    count = at_least(1, int)
    parser.add_argument("--pp", type=count, metavar="N", help="stages (default: what suits here)")
    parser.add_argument("--tp", type=count, metavar="N", help="ranks of a stage")
    parser.add_argument("--quick", action="store_true", help="do not try to import vLLM")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    args = parser.parse_args(argv)

    vllm = installed_vllm()
    gpus = gpus_here()
    device = vllm.device if vllm else "cpu"
    suits, state, advice = best_degrees(device, gpus)
    stages, ranks = (args.pp or 1, args.tp or 1) if args.pp or args.tp else suits
    findings = [
        *_software(vllm, try_import=not args.quick),
        *_hardware(gpus),
        Finding("best degrees", state, advice),
        *_what_sipipe_does(stages, ranks, suits, device, gpus),
    ]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        _show(findings)
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _software(vllm: InstalledVllm | None, *, try_import: bool) -> Iterator[Finding]:
    """Findings on vLLM, the libraries that it uses, and a compiler."""
    yield Finding("SiPipe", "ok", f"{__version__}, Python {platform.python_version()}")
    if vllm is None:
        yield Finding("vLLM", "error", f"not installed: {HOW_TO_INSTALL}")
        return
    build = f"{vllm.version}, {vllm.device.upper()} build ({vllm.distribution})"
    if vllm.supported:
        yield Finding("vLLM", "ok", f"{build}, supported")
    else:
        yield Finding("vLLM", "error", f"{build}: SiPipe supports {', '.join(SUPPORTED_VLLM)}")
    if try_import:
        yield _import_vllm()
    if vllm.device == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            missing = "libnuma.so.1 is missing: apt install libnuma1, or dnf install numactl-libs"
            yield Finding("libnuma", "error", missing)
        if cpu_features.slow():
            yield Finding("dtypes", "warning", cpu_features.HINT)
        preloaded = os.environ.get("LD_PRELOAD", "")
        lacks = [f"{name} ({how})" for name, how in PRELOADS.items() if name not in preloaded]
        text = (
            f"LD_PRELOAD has no {' and no '.join(lacks)}, which vLLM advises"
            if lacks
            else preloaded
        )
        yield Finding("preloads", "warning" if lacks else "ok", text)
    name = os.environ.get("CXX", "g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "no Python.h (apt install python3-dev, dnf install python3-devel)"
        yield Finding("compiler", "warning", f"{missing}: only --enforce-eager works")
    elif compiler := shutil.which(name):
        yield Finding("compiler", "ok", compiler)
    else:
        # torch.compile runs CXX as one program, so that "ccache g++" is none.
        named = f'no program is named "{name}" (CXX)' if "CXX" in os.environ else "no g++"
        missing = f"{named}: torch.compile needs one, so only --enforce-eager works"
        yield Finding("compiler", "warning", missing)


def _import_vllm() -> Finding:
    """Try to import vLLM, and SiPipe's executor, in another process."""
    code = "import transformers, vllm.v1.executor.abstract, sipipe; sipipe.Executor"
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("import", "error", f"importing vLLM took more than {SECONDS:.0f} s")
    if done.returncode == 0:
        return Finding("import", "ok", "vLLM and SiPipe's executor import")
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if remedy := of_companions(done.stderr):
        reason += f" ({remedy})"
    return Finding("import", "error", reason)


def _hardware(gpus: Sequence[str]) -> Iterator[Finding]:
    """Findings on cores, memory, the kernel and GPUs."""
    cores = this_machine()
    cpus = cpus_of(cores)
    nodes = Counter(core.node for core in cores)
    per_node = ", ".join(f"node {node}: {count} cores" for node, count in nodes.items())
    threads = f"CPUs {format_cpus(cpus)}, {len(cpus) // len(cores)} a core"
    cpus_time = quota()
    limit = "" if math.isinf(cpus_time) else f", a quota of {cpus_time:g} CPUs' time"
    yield Finding("cores", "ok", f"{len(cores)} ({threads}), NUMA {per_node}{limit}")
    total = psutil.virtual_memory().total / 2**30
    free = free_bytes() / 2**30
    yield Finding("memory", "ok", f"{total:,.1f} GiB, {free:,.1f} GiB may be used")
    yield _kernel(platform.release())
    for index, line in enumerate(gpus):
        yield Finding(f"GPU {index}", "ok", line)
    if not gpus:
        yield Finding("GPUs", "ok", "none found (nvidia-smi)")


def _kernel(release: str) -> Finding:
    """Finding on the kernel: it has to have pidfd_open, and should have the time slices for which
    :func:`~sipipe.core_binding.run_soon` asks."""
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        text = f"{release}: no pidfd_open ({error.strerror}): SiPipe needs Linux 5.3 or later"
        return Finding("kernel", "error", text)
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) >= (6, 12):
        return Finding("kernel", "ok", release)
    late = "what wakes up beside a busy process may wait 4 ms; Linux 6.12 lets SiPipe's run at once"
    return Finding("kernel", "warning", f"{release}: {late}")


def _what_sipipe_does(
    stages: int, ranks: int, suits: tuple[int, int], device: Device, gpus: Sequence[str]
) -> Iterator[Finding]:
    """Findings on what SiPipe would do with these degrees."""
    workers = stages * ranks
    cores = len(this_machine())
    if workers > MOST_PLANNED:
        text = f"--pp {stages} --tp {ranks} are {workers} workers, more than any host runs"
        yield Finding("core plan", "error", text)
        return
    if device == "cpu" and workers > cores:
        yield Finding(
            "core plan",
            "error" if workers > MOST_WORKERS * cores else "warning",
            f"--pp {stages} --tp {ranks} are {workers} workers, here are {cores} cores: workers "
            f"that share a core wait for each other, --pp {suits[0]} --tp {suits[1]} suits these",
        )
        if workers > MOST_WORKERS * cores:
            return
    elif device == "cpu" and workers > 1:
        facts = load_model("qwen3-0.6b")
        quicker = quicker_on_cpus(facts, stages, ranks)
        if quicker:
            text = f"for {facts.name} quicker, computed from this machine's parts: {quicker}"
            yield Finding("other degrees", "ok", text)
    aside = device == "cuda" and stages == 1
    if aside:  # the rest is of SiPipe's own processes
        yield Finding("who runs it", "ok", STEPS_ASIDE)
    plan = plan_cores(this_machine(), stages=stages, tensor_parallel=ranks, device=device)
    if not aside:
        first, second = plan.describe()
        note = " (too few cores to overlap everything)" if plan.shared else ""
        yield Finding("core plan", "ok", first.removeprefix("core plan: ") + note)
        samplers = second.strip().removesuffix(" (shared: fewer cores than processes)")
        yield Finding("", "ok", samplers)
    if device == "cpu":
        yield Finding("binding", "ok", f'VLLM_CPU_OMP_THREADS_BIND="{plan.omp_threads_bind()}"')
    elif len(gpus) < stages * ranks:
        missing = f"--pp {stages} --tp {ranks} needs {stages * ranks}, here are {len(gpus)}"
        yield Finding("GPUs", "error", missing)
    if not aside:
        most = SiPipeConfig().resolved_inflight(stages)
        transport = "shm" if device == "cpu" else "cuda_ipc (untested between GPUs)"
        text = f"up to {most} microbatches in flight, transport {transport}"
        yield Finding("pipeline", "ok", text)
    yield Finding("start with", "ok", f"sipipe serve MODEL --pp {stages} --tp {ranks}")


def _show(findings: Sequence[Finding]) -> None:
    """Print the findings, a line each."""
    marks = {"ok": "ok", "warning": "!!", "error": "no"}
    width = max(len(finding.what) for finding in findings)
    for what, state, text in findings:
        print(f"{marks[state]}  {what:<{width}}  {text}")
