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
from sipipe.cores import MOST_PLANNED
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
"""Seconds that a step may take."""
LEAST = 1e-4
"""Least p of the chi-square test. Below it draws count as wrong."""


def main(argv: Sequence[str]) -> int:
    """Run the steps; returns the exit status. 0: every step is fine or skipped. 1: one failed."""
    about = "Whether SiPipe works on this machine's GPUs, and how quick it is, as a file to send."
    parser = make_parser("gpu-check", about, epilog=EPILOG)
    what = f"a small one of Llama's kind (default: {MODEL})"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=MODEL, help=what)
    add = adder(parser)
    count = at_least(1, int)
    add("--out", Path, Path("sipipe-gpu-check.jsonl"), "FILE", "default: sipipe-gpu-check.jsonl")
    add("--steps", str, ",".join(STEPS), "LIST", "default: all")
    degree = at_least(1, int, MOST_PLANNED)
    add("--pp", degree, None, "N", "stages of the large model (default: a GPU each)")
    add("--tp", degree, 1, "N", "ranks of its stages (default: 1)")
    add("--nnodes", count, 1, "N", "2: the step links tries those between two hosts (default: 1)")
    add("--node-rank", at_least(0, int), 0, "N", "0 on the host of --master-addr, 1 on the other")
    add("--master-addr", str, "", "ADDRESS", "host 0's address, on both hosts")
    port = at_least(1, int, 65000)
    add("--master-port", port, 29501, "PORT", "the first of three ports there (default: 29501)")
    parser.add_argument("--without-gpu", action="store_true", help="what needs none, on CPUs")
    args = parser.parse_args(argv)
    wrong = [name for name in args.steps.split(",") if name not in STEPS]
    if wrong:
        raise ConfigError(f'gpu-check: --steps "{wrong[0]}" is none of {", ".join(STEPS)}')
    if args.nnodes > 1:
        _check_hosts(args)
    require_vllm()
    import torch

    gpus = torch.cuda.device_count()
    if not gpus and not args.without_gpu:
        raise ConfigError(
            "no CUDA device is visible (nvidia-smi, CUDA_VISIBLE_DEVICES): --without-gpu runs the "
            "steps that need none"
        )
    if args.out.exists() and not args.out.is_file():  # reading a pipe would wait for its writer
        raise ConfigError(f'gpu-check: --out "{args.out}" is no regular file')
    try:
        args.out.open("a").close()
        _lines(args.out)
    except (OSError, ValueError) as error:  # ValueError: lines of something else
        raise ConfigError(f'gpu-check: --out "{args.out}" cannot be appended to: {error}') from None
    args.pp = args.pp or max(1, gpus // args.tp)
    fine = [_step(name, args, gpus) for name in args.steps.split(",")]
    print(f"{args.out}: {len(fine)} steps, {fine.count(False)} failed")
    return 0 if all(fine) else 1


def _check_hosts(args: argparse.Namespace) -> None:
    """Refuse what does not fit two hosts. Raises ConfigError, which names the option."""
    if args.steps != "links":
        raise ConfigError(
            "gpu-check: --nnodes needs --steps links: the other steps run on one host"
        )
    if args.nnodes > 2 or args.node_rank > 1:
        raise ConfigError("gpu-check: --nnodes is 2 at most, and --node-rank 0 or 1")
    if not args.master_addr:
        raise ConfigError(
            "gpu-check: --nnodes 2 needs --master-addr, host 0's address, on both hosts"
        )


def _step(name: str, args: argparse.Namespace, gpus: int) -> bool:
    """Run the step ``name`` and append its line to the file; True if nothing was wrong."""
    step = STEPS[name]
    began = time.monotonic()
    line = {"step": name, "model": args.model}
    line["at"] = time.strftime("%F %T")
    least = 0 if step.get("small") and not gpus else step.get("gpus", 0)
    if gpus < least:
        line["skipped"] = f"needs {least} GPUs, {gpus} visible" if gpus else "no CUDA"
    else:
        try:
            line |= _result(name, step, args, gpus)
        except SiPipeError as error:
            line |= {"failed": str(error), "log": "".join(getattr(error, "__notes__", ()))}
    line["seconds"] = f"{time.monotonic() - began:.1f}"
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    state = next((f"{key}: {line[key]}" for key in ("skipped", "failed") if key in line), "fine")
    print(f"{name}: {state} ({line['seconds']} s)", flush=True)
    return "failed" not in line


def _result(name: str, step: Options, args: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Run a step; returns the entries of its line that say what came of it."""
    if "links" in step:
        return _tried_links(name, args)
    if "load" not in step:
        command = (sys.executable, "-P", "-m", "sipipe", "doctor", "--quick", "--json")
        doctor = output(*command, failing=True)
        topology = output("nvidia-smi", "topo", "-m")
        return {"found": machine(), "doctor": json.loads(doctor or "[]"), "topology": topology}
    with tempfile.TemporaryDirectory(prefix="sipipe-trace-") as trace:
        job = _server(step, args, gpus, trace)
        measurement = measured(name, job, "sipipe.tools.load", timeout=SECONDS)
        result: dict[str, Any] = {"found": measurement}
        if "trace" in step:
            words = ("-m", "sipipe", "trace", "report", trace, "--json")
            report = output(sys.executable, "-P", *words)
            result["trace"] = json.loads(report or "{}")
    # Large models have neither: they would take too long.
    answers = measurement.get("answers")
    draws = measurement.get("draws")
    like = step.get("like")
    if like:
        reference = _answers_of(like, args)
        result["compared with"] = like if reference and answers else "nothing"
        if reference and answers and reference != answers:
            result["failed"] = f"greedy tokens are not those of {like}"
    if draws and draws["p"] < LEAST:
        result["failed"] = "what was drawn does not fit the server's own probabilities"
    return result


def _tried_links(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Try links; returns the entries of the step's line. A pair that no transport joins has failed."""
    job = {
        "nnodes": args.nnodes,
        "node_rank": args.node_rank,
        "address": args.master_addr,
        "port": args.master_port,
    }
    measurement = measured(name, job, "sipipe.tools.link_trials", timeout=SECONDS)
    result: dict[str, Any] = {"found": measurement}
    apart = [
        pair
        for pair, transports in measurement["links"].items()
        if all("failed" in finding for finding in transports.values())
    ]
    if apart:
        result["failed"] = f"no transport joins {', '.join(apart)}"
    return result


def _answers_of(step: str, args: argparse.Namespace) -> Any:
    """The last answers of another step with the same model, in the file; None: there are none."""
    answers = [
        line["found"]["answers"]
        for line in _lines(args.out)
        if line.get("model", args.model) == args.model and line["step"] == step and "found" in line
    ]
    known = [answer for answer in answers if answer]  # None: the server refused to tell them
    return known[-1] if known else None


def _lines(out: Path) -> list[dict[str, Any]]:
    """The lines of steps in a file. Raises ValueError: it has lines of something else."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError("it has lines that are no JSON objects")
    return [line for line in lines if "step" in line]


def _server(step: Options, args: argparse.Namespace, gpus: int, trace: str) -> dict[str, Any]:
    """The entries of :class:`sipipe.tools.load.Job` for a step: its server and its load."""
    load = TABLE["load"][step["load"]]
    if step.get("small") and not gpus:
        load = load["small"]
    row = shlex.split(step["row"])
    p = step.get("pp", args.pp)
    t = step.get("tp", args.tp)
    settings: dict[str, Any] = {}
    if not step.get("plain"):
        settings["cpu_sampling"] = step.get("draw", "auto")
    if 0 < gpus < p * t:
        settings["devices"] = [0] * p
        row += ["--gpu-memory-utilization", "0.4"]
    if row[:1] != ["stock"]:
        row += ["--additional-config", json.dumps({"sipipe": settings})]
        if "trace" in step:
            row += ["--trace", trace]
    job = server_job([args.model, "-pp", str(p), "-tp", str(t), *shlex.split(load["options"])], row)
    job["env"]["VLLM_LOGGING_LEVEL"] = "INFO"
    if "like" in step:
        job["env"]["VLLM_GPU_SYNC_CHECK"] = "error"
    send = ["--dataset-name", "random", "--random-input-len", "16", *shlex.split(load["send"])]
    more = {"loads": load["loads"], "draws": load["draws"], "repeat": 1, "load": send}
    return job | more | {"model": args.model, "mixes": SAMPLING}
