"""Whether a kept figure is of today's code, by hashes of the packages that it measures.

A hash is of what Python compiles: comments, docstrings and layout do not count. A result keeps those
of the commit that it was measured at (``"sources"``).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/sipipe", "benchmarks", "deploy")
"""In which measured code is."""
SERVED = (
    *(f"sipipe/{part}" for part in ("engine", "worker", "ipc", "messages", "sampler", "observe")),
    *(f"sipipe/{part}.py" for part in ("config", "cores", "jit", "linux")),
)
_SAMPLING = ("sipipe/sampler", "sipipe/messages", "sipipe/jit.py")
_SCHEDULING = ("sipipe/engine/scheduling", "benchmarks/simulator")
_PLANNER = ("sipipe/tools/planner", "sipipe/engine/layers")
_EMULATED = (
    *SERVED,
    "sipipe/tools/planner",
    "benchmarks/emulation",
    "benchmarks/emulate.py",
    "benchmarks/ablation.py",
)
_RECORDED = ("sipipe/observe", "sipipe/tools/report")
MEASURED = {
    "ablation": (*SERVED, "benchmarks/ablation.py"),
    "advice": ("sipipe/cli/advice.py", *_PLANNER, "sipipe/cores.py"),
    "balance": ("sipipe/engine/iteration/balance.py",),
    "breakdown": (*SERVED, "sipipe/tools/report"),
    "channels": ("sipipe/ipc/ring", "sipipe/ipc/gather.py", "sipipe/messages"),
    "drafting": (
        "sipipe/sampler/drafts.py",
        "sipipe/sampler/kernels",
        "sipipe/engine/scheduling/speculation.py",
    ),
    "emulation": _EMULATED,
    "planner": _PLANNER,
    "planner-cpu": (*_PLANNER, *SERVED),
    "prefill-apart": (*SERVED, "deploy/prefill_router.py"),
    "prefill-emulated": _EMULATED,
    "sampling": _SAMPLING,
    "sampling-columns": (
        *_SAMPLING,
        "benchmarks/paper_columns.py",
        "benchmarks/sampling_columns.py",
    ),
    "scheduling": _SCHEDULING,
    "serving-product": ("sipipe/worker",),
    "speculation-emulated": _EMULATED,
    "split": (*SERVED, "benchmarks/asleep.py"),
    "stage": ("sipipe/worker",),
    "start": (*SERVED, "sipipe/cli"),
    "timeline": (*SERVED, "sipipe/tools/report"),
    "trace": _RECORDED,
    "trace-served": (*SERVED, "sipipe/tools/report"),
    "transfer": ("sipipe/ipc/link",),
    "vocabulary-gpus": _EMULATED,
    "waking": ("sipipe/cores.py",),
}
"""By the beginning of a result's name, the longest that fits; all others are of served engines."""


def changed(name: str, result: dict[str, Any]) -> list[str]:
    """Packages that the result ``name`` measures and that are others today."""
    then = result.get("sources", {})
    return [part for part, digest in sources(name).items() if then.get(part) != digest]


def sources(name: str, commit: str = "") -> dict[str, str]:
    """What the result ``name`` measures, with its hash at ``commit``; empty: in this checkout."""
    fits = [each for each in MEASURED if f"{name}-".startswith(f"{each}-")]
    parts = MEASURED[max(fits, key=len)] if fits else SERVED
    return {part: _digest(part, commit) for part in parts}


@functools.cache
def _digest(part: str, commit: str) -> str:
    found = hashlib.sha256()
    for path, text in sorted(_files(commit).items()):
        if path == part or path.startswith(f"{part}/"):
            found.update(f"{path}\0{_meaning(text)}\0".encode())
    return found.hexdigest()[:12]


@functools.cache
def _files(commit: str) -> dict[str, str]:
    """Texts by path, as in ``sipipe/cores.py`` and ``benchmarks/busy.py``."""
    if not commit:
        return {
            str(path.relative_to(ROOT)).removeprefix("src/"): path.read_text()
            for folder in FOLDERS
            for path in (ROOT / folder).rglob("*.py")
        }
    command = ["git", "archive", commit, *FOLDERS]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = ((each.name, archive.extractfile(each)) for each in archive.getmembers())
        return {
            name.removeprefix("src/"): file.read().decode()
            for name, file in files
            if file is not None and name.endswith(".py")
        }


@functools.cache
def _meaning(text: str) -> str:
    return "".join(_words(ast.parse(text)))


def _words(node: Any) -> Iterator[str]:
    """A tree in words that are the same in every version of Python: what is empty is left out."""
    if isinstance(node, list):
        for each in node:
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                yield from _words(each)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field, value in ast.iter_fields(node):
            if value not in (None, []):
                yield f" {field}="
                yield from _words(value)
        yield ")"
    else:
        yield repr(node)
