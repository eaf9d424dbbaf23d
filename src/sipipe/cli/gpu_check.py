"""``sipipe gpu-check``: whether SiPipe works on this machine's GPUs, and how quick its parts are.

The steps are those of ``sipipe/tools/gpu_steps.toml``; docs/gpu.md says which have run on a GPU.
What needs none is run by tests.
"""

import argparse
import json
import shlex
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sipipe.cli.bench_rows import server_job
from sipipe.cli.parser import adder, at_least, make_parser
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.child import measured
from sipipe.tools.load import SAMPLING
from sipipe.tools.provenance import machine, output
from sipipe.versions import require_vllm

Options = Mapping[str, Any]

TABLE: dict[str, Any] = tomllib.loads((files("sipipe.tools") / "gpu_steps.toml").read_text())
STEPS: dict[str, dict[str, Any]] = TABLE["steps"]
EPILOG = f"""\
Each step is a process of its own and appends a line of JSON to FILE: send that file with what you
report. A step that needs more GPUs than are visible is skipped; one that fails has the end of its
log in its line. In order:

{textwrap.fill(", ".join(STEPS), 96, initial_indent="  ", subsequent_indent="  ")}
"""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SECONDS = 540.0
"""That a step may take."""
LEAST = 1e-4
"""Of the chi-square's p: below it draws are wrong."""


def main(argv: Sequence[str]) -> int:
    """0: every step is fine or skipped. 1: one failed."""
    about = "Whether SiPipe works on this machine's GPUs, and how quick it is, as a file to send."
    parser = make_parser("gpu-check", about, epilog=EPILOG)
    what = f"a small one of Llama's kind (default: {MODEL})"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=MODEL, help=what)
    add, count = adder(parser), at_least(1, int)
    add("--out", Path, Path("sipipe-gpu-check.jsonl"), "FILE", "default: sipipe-gpu-check.jsonl")
    add("--steps", str, ",".join(STEPS), "LIST", "default: all")
    add("--pp", count, None, "N", "stages of the large model (default: a GPU each)")
    add("--tp", count, 1, "N", "ranks of its stages (default: 1)")
    parser.add_argument("--without-gpu", action="store_true", help="what needs none, on CPUs")
    own = parser.parse_args(argv)
    if wrong := [name for name in own.steps.split(",") if name not in STEPS]:
        raise ConfigError(f'gpu-check: --steps "{wrong[0]}" is none of {", ".join(STEPS)}')
    require_vllm()
    import torch

    gpus = torch.cuda.device_count()
    if not gpus and not own.without_gpu:
        raise ConfigError(
            "no CUDA device is visible (nvidia-smi, CUDA_VISIBLE_DEVICES): --without-gpu runs the "
            "steps that need none"
        )
    try:
        own.out.open("a").close()
        _lines(own.out)
    except (OSError, ValueError) as error:  # ValueError: lines of something else
        raise ConfigError(f'gpu-check: --out "{own.out}" cannot be appended to: {error}') from None
    own.pp = own.pp or max(1, gpus // own.tp)
    fine = [_step(name, own, gpus) for name in own.steps.split(",")]
    print(f"{own.out}: {len(fine)} steps, {fine.count(False)} failed")
    return 0 if all(fine) else 1


def _step(name: str, own: argparse.Namespace, gpus: int) -> bool:
    """Run it and append its line; whether nothing was wrong."""
    step, line, began = STEPS[name], {"step": name, "model": own.model}, time.monotonic()
    line["at"] = time.strftime("%F %T")
    if gpus < (least := step.get("gpus", 0)):
        line["skipped"] = f"needs {least} GPUs, {gpus} visible" if gpus else "no CUDA"
    else:
        try:
            line |= _found(name, step, own, gpus)
        except SiPipeError as error:
            line |= {"failed": str(error), "log": "".join(getattr(error, "__notes__", ()))}
    line["seconds"] = f"{time.monotonic() - began:.1f}"
    with own.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    state = next((f"{key}: {line[key]}" for key in ("skipped", "failed") if key in line), "fine")
    print(f"{name}: {state} ({line['seconds']} s)", flush=True)
    return "failed" not in line


def _found(name: str, step: Options, own: argparse.Namespace, gpus: int) -> dict[str, Any]:
    if "load" not in step:
        command = (sys.executable, "-P", "-m", "sipipe", "doctor", "--quick", "--json")
        doctor = output(*command, failing=True)
        joined = output("nvidia-smi", "topo", "-m")
        return {"found": machine(), "doctor": json.loads(doctor or "[]"), "topology": joined}
    with tempfile.TemporaryDirectory(prefix="sipipe-trace-") as trace:
        job = _server(step, own, gpus, trace)
        found: dict[str, Any] = {"found": measured(name, job, "sipipe.tools.load", timeout=SECONDS)}
        if "trace" in step:
            words = ("-m", "sipipe", "trace", "report", trace, "--json")
            report = output(sys.executable, "-P", *words)
            found["trace"] = json.loads(report or "{}")
    answers, drawn = map(found["found"].get, ("answers", "draws"))  # of large models neither
    if like := step.get("like"):
        lines = [one for one in _lines(own.out) if one.get("model", own.model) == own.model]
        theirs = [
            one["found"]["answers"] for one in lines if one["step"] == like and "found" in one
        ]
        told = [answer for answer in theirs if answer]  # None: it refused to tell them
        found["compared with"] = like if told and answers else "nothing"
        if told and answers and told[-1] != answers:
            found["failed"] = f"greedy tokens are not those of {like}"
    if drawn and drawn["p"] < LEAST:
        found["failed"] = "what was drawn does not fit the server's own probabilities"
    return found


def _lines(out: Path) -> list[dict[str, Any]]:
    return [one for line in out.read_text().splitlines() if "step" in (one := json.loads(line))]


def _server(step: Options, own: argparse.Namespace, gpus: int, trace: str) -> dict[str, Any]:
    """A :class:`sipipe.tools.load.Job`."""
    load, row = TABLE["load"][step["load"]], shlex.split(step["row"])
    p, t = step.get("pp", own.pp), step.get("tp", own.tp)
    settings: dict[str, Any] = {}
    if not step.get("plain"):
        settings["cpu_sampling"] = step.get("draw", "auto")
    if 0 < gpus < p * t:
        settings["devices"] = [0] * p
        row += ["--gpu-memory-utilization", "0.4"]
    if row[:1] != ["stock"]:
        row += ["--additional-config", json.dumps({"sipipe": settings})]
        row += ["--trace", trace] * ("trace" in step)
    job = server_job([own.model, "-pp", str(p), "-tp", str(t), *shlex.split(load["options"])], row)
    job["env"] |= {"VLLM_LOGGING_LEVEL": "INFO"}
    job["env"] |= {"VLLM_GPU_SYNC_CHECK": "error"} if "like" in step else {}
    send = ["--dataset-name", "random", "--random-input-len", "16", *shlex.split(load["send"])]
    more = {"loads": load["loads"], "draws": load["draws"], "repeat": 1, "load": send}
    return job | more | {"model": own.model, "mixes": SAMPLING}
