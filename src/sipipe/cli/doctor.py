"""``sipipe doctor``: what this machine has, and what SiPipe would do on it.

Findings are gathered without importing vLLM here; whether it can be imported at all is tried in
a process of its own, because that takes seconds and may crash.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import psutil

from sipipe._version import __version__
from sipipe.cli.parser import at_least, make_parser
from sipipe.config import SiPipeConfig
from sipipe.cores import format_cpus, plan_cores, this_machine
from sipipe.errors import ResourceError
from sipipe.versions import SUPPORTED_VLLM, installed_vllm

EXAMPLE: dict[str, Any] = {
    "vocabulary": 151_936,
    "dtype": "bfloat16",
    "sequences": 256,
    "tokens": 8_192,
    "hidden": 4_096,
}
"""Sizes of the model whose channels the report counts: a large vocabulary, vLLM's usual batches."""

IMPORT_SECONDS = 120.0
"""How long an import of vLLM may take before it counts as broken."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    what: str
    state: Literal["ok", "warning", "error"]
    text: str


def main(argv: Sequence[str]) -> int:
    parser = make_parser("doctor", "What this machine has, and what SiPipe would do on it.")
    count = at_least(1, int)
    parser.add_argument("--pp", type=count, default=2, metavar="N", help="stages (default: 2)")
    parser.add_argument("--tp", type=count, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument("--quick", action="store_true", help="do not try to import vLLM")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    args = parser.parse_args(argv)

    gpus = _gpus()
    findings = [
        *_software(try_import=not args.quick),
        *_hardware(gpus),
        *_what_sipipe_does(args.pp, args.tp, gpus),
    ]
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _software(*, try_import: bool) -> Iterator[Finding]:
    yield _ok("SiPipe", f"{__version__}, Python {platform.python_version()}")
    vllm = installed_vllm()
    supported = ", ".join(SUPPORTED_VLLM)
    if vllm is None:
        yield _error(
            "vLLM",
            f"not installed: pip install vllm=={SUPPORTED_VLLM[-1]} (CUDA), or `make setup` in "
            "SiPipe's repository (CPU)",
        )
        return
    build = f"{vllm.version}, {vllm.device.upper()} build ({vllm.distribution})"
    if vllm.supported:
        yield _ok("vLLM", f"{build}, supported")
    else:
        yield _error("vLLM", f"{build}: SiPipe supports {supported}")
    if try_import:
        yield _import_vllm()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler:
        yield _ok("compiler", compiler)
    else:
        yield _warning("compiler", "no g++: torch.compile needs one, so only --enforce-eager works")


def _import_vllm() -> Finding:
    code = "import transformers, vllm.v1.executor.abstract, sipipe; sipipe.Executor"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _error("import", f"importing vLLM took more than {IMPORT_SECONDS:.0f} s")
    if done.returncode == 0:
        return _ok("import", "vLLM and SiPipe's executor import")
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if "torchvision" in done.stderr:
        reason += " (a torchvision for CUDA beside a torch for CPU: pip uninstall torchvision)"
    return _error("import", reason)


def _hardware(gpus: Sequence[str]) -> Iterator[Finding]:
    machine = this_machine()
    threads = len(machine.cpus) // len(machine.cores)
    cores = f"{len(machine.cores)} (CPUs {format_cpus(machine.cpus)}, {threads} a core)"
    per_node = [
        f"node {node}: {sum(core.node == node for core in machine.cores)} cores"
        for node in machine.nodes
    ]
    yield _ok("cores", f"{cores}, NUMA {', '.join(per_node)}")
    memory = psutil.virtual_memory()
    yield _ok("memory", f"{_gib(memory.total)}, {_gib(memory.available)} available")
    if gpus:
        for index, line in enumerate(gpus):
            yield _ok(f"GPU {index}", line)
    else:
        yield _ok("GPUs", "none found (nvidia-smi)")


def _shared_memory(stages: int, ranks: int, samplers: int, device: str) -> Finding:
    from sipipe.engine.memory_budget import check_budget, describe, memory_budget
    from sipipe.ipc.memory import free_bytes

    budget = memory_budget(
        stages=stages,
        ranks=ranks,
        samplers=samplers,
        inflight=SiPipeConfig().resolved_inflight(stages),
        on_gpu=device == "cuda",
        **EXAMPLE,
    )
    text = describe(budget).removeprefix("shared memory: ")
    text += f" for {EXAMPLE['sequences']} sequences and a vocabulary of {EXAMPLE['vocabulary']:,}"
    try:
        check_budget(budget)
    except ResourceError as error:
        return _warning("shared memory", str(error))
    return _ok("shared memory", text + f", {_gib(free_bytes(None))} free")


def _gpus() -> list[str]:
    """Name and memory of each GPU that nvidia-smi lists."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [command, *query], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _what_sipipe_does(stages: int, ranks: int, gpus: Sequence[str]) -> Iterator[Finding]:
    vllm = installed_vllm()
    device: Literal["cpu", "cuda"] = "cuda" if vllm and vllm.device == "cuda" else "cpu"
    plan = plan_cores(this_machine(), stages=stages, tensor_parallel=ranks, device=device)
    first, second = plan.describe()
    note = " (too few cores to overlap everything)" if plan.shared else ""
    yield _ok("core plan", first.removeprefix("core plan: ") + note)
    yield _ok("", second.strip().removesuffix(" (shared: fewer cores than processes)"))
    if device == "cpu":
        yield _ok("binding", f'VLLM_CPU_OMP_THREADS_BIND="{plan.omp_threads_bind()}"')
    elif len(gpus) < stages * ranks:
        yield _warning(
            "GPUs", f"--pp {stages} --tp {ranks} needs {stages * ranks}, here are {len(gpus)}"
        )
    yield _shared_memory(stages, ranks, len(plan.samplers), device)
    inflight = SiPipeConfig().resolved_inflight(stages)
    transport = "shm" if device == "cpu" else "cuda_ipc (untested on a GPU)"
    yield _ok("pipeline", f"up to {inflight} microbatches in flight, transport {transport}")
    yield _ok("start with", f"sipipe serve MODEL --pp {stages} --tp {ranks}")


def _show(findings: Sequence[Finding]) -> None:
    colour = {"ok": "32", "warning": "33", "error": "31"} if sys.stdout.isatty() else {}
    marks = {"ok": "ok", "warning": "!!", "error": "no"}
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = marks[finding.state]
        if colour:
            mark = f"\033[{colour[finding.state]}m{mark}\033[0m"
        print(f"{mark}  {finding.what:<{width}}  {finding.text}")


def _ok(what: str, text: str) -> Finding:
    return Finding(what=what, state="ok", text=text)


def _warning(what: str, text: str) -> Finding:
    return Finding(what=what, state="warning", text=text)


def _error(what: str, text: str) -> Finding:
    return Finding(what=what, state="error", text=text)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
