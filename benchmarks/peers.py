"""What people would take in place of vLLM on a CPU, beside SiPipe's one stage and stock vLLM's.

    python -m benchmarks.peers [MODEL] [--quick] [--engines 2] [--skip llama.cpp]

Installs llama.cpp's server (built from the sources in the package llama-cpp-python) and OpenVINO GenAI
from the package index into ``build/peers``, which takes half an hour once, and writes the model as a
GGUF file of 16 bits that both read. Nothing is tuned, and each has its own defaults but for what makes
them comparable: as many threads as there are cores, room for all requests, no prompt cache.

llama.cpp's server, SiPipe and stock vLLM are all alive and answer in turn, by vLLM's client
(:mod:`benchmarks.side_by_side`). OpenVINO GenAI has no server in its packages: it answers prompts of
the same lengths alone and without HTTP (:mod:`benchmarks.openvino_alone`), which spares it the few
percent of CPU time that a front end takes. Its KV cache has 8 bits by default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

from benchmarks.harness import report, served_dtype, spread
from benchmarks.served import LENGTHS, server
from benchmarks.side_by_side import Load, Runs, answered
from sipipe.errors import SiPipeError
from sipipe.tools.load import SAMPLING

PLACE = Path("build/peers")
LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
TOOLS = ("cmake", "ninja")
ALONE = Path(__file__).with_name("openvino_alone.py")
LONGEST = 1_024
"""Tokens of a request at most: 600 in, 300 out."""
SETTINGS = (("short", "greedy", 64), ("short", "chat", 64), ("short", "greedy", 8),
            ("short", "greedy", 1), ("chat", "greedy", 8))  # fmt: skip
TOKENS = {"short": ((16, 16), (32, 32)), "chat": ((200, 600), (100, 300))}
"""Fewest and most prompt tokens of a load, and fewest and most new ones."""
MINUTES = 60
"""That building one of them may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="build/models/SmolLM2-135M-Instruct")
    add("--quick", action="store_true", help="few short requests, one engine")
    add("--engines", type=int, default=2, help="of each (default: 2)")
    add("--skip", default="", metavar="LIST", help="of llama.cpp, OpenVINO")
    args = parser.parse_args()
    skipped = args.skip.split(",")
    settings = [("short", "greedy", 4)] if args.quick else list(SETTINGS)
    engines = 1 if args.quick else args.engines
    gguf = converted(args.model)
    servers = {"sipipe-one": server(args.model, "sipipe-one")}
    servers["stock-one"] = server(args.model, "stock-one")
    most = max(count for *_, count in settings)
    if "llama.cpp" not in skipped:
        servers["llama.cpp"] = llama_cpp(gguf, most)
    loads = [
        Load(
            name=f"{name}, {way}, {count}",
            sampling=way,
            requests=count,
            rate=0.0,
            words=LENGTHS[name],
            learnt=min(count, 8),
        )
        for name, way, count in settings
    ]
    rounds: list[Runs] = []
    for turn in range(engines):
        order = list(servers)[:: -1 if turn % 2 else 1]
        started = {name: servers[name] for name in order}
        rounds.append(answered(started, args.model, loads, first=1000 * turn, timeout=7_200))
    alone = [] if "OpenVINO" in skipped else [openvino(gguf, settings) for _ in range(engines)]
    report(
        "peers",
        f"Beside other engines, {Path(args.model).name}, one stage, {engines} engine(s) each, "
        f"{served_dtype()} in SiPipe and stock vLLM, weights of 16 bits in the others",
        table(settings, list(servers), rounds, alone),
        note=f"{LLAMA_CPP} and {OPENVINO}, not tuned; short: 16 tokens in, 32 out; chat: 200 to 600 in, "
        "100 to 300 out; OpenVINO offline, alone, KV cache of 8 bits; medians and ranges",
    )


def table(
    settings: list[tuple[str, str, int]],
    names: list[str],
    rounds: list[Runs],
    alone: list[list[float]],
) -> list[dict[str, Any]]:
    """A line for each load and engine."""
    rows = []
    for place, (name, way, count) in enumerate(settings):
        load = f"{name}, {way}, {count}"
        speeds = {
            engine: [run["output_throughput"] for runs in rounds for run in runs[load][engine]]
            for engine in names
        }
        if alone:
            speeds["OpenVINO"] = [figures[place] for figures in alone]
        ours = spread(speeds["sipipe-one"])["median"]
        for engine, each in speeds.items():
            row = {"load": name, "sampling": way, "requests": count, "engine": engine}
            of_ours = spread(each)["median"] / ours
            rows.append(row | {"tok/s": spread(each), "of SiPipe's one stage": of_ours})
    return rows


def environment() -> Path:
    """The peers' own virtual environment, its ``bin``; made and filled where it is not there."""
    binaries = PLACE / "venv" / "bin"
    ready = PLACE / "venv" / f"{OPENVINO}.installed"
    if not ready.exists():
        venv.create(PLACE / "venv", with_pip=True, clear=True)
        run_step([str(binaries / "python"), "-m", "pip", "install", "--quiet", *TOOLS, OPENVINO])
        ready.touch()
    return binaries


def sources() -> Path:
    """The directory of llama.cpp's sources, unpacked from the package."""
    folder = PLACE / LLAMA_CPP.replace("==", "-").replace("-", "_", 2) / "vendor" / "llama.cpp"
    if not folder.exists():
        pip = [str(environment() / "python"), "-m", "pip", "download", "--quiet", "--no-deps"]
        run_step([*pip, "--no-binary", ":all:", "--dest", str(PLACE), LLAMA_CPP])
        with tarfile.open(next(PLACE.glob("llama_cpp_python*.tar.gz"))) as archive:
            archive.extractall(PLACE, filter="data")
    return folder


def converted(model: str) -> Path:
    """The GGUF file of a checkpoint, weights of 16 bits, by llama.cpp's own program."""
    file = PLACE / f"{Path(model).name}.gguf"
    if not file.exists():
        partial = file.with_suffix(".part")
        program = str(sources() / "convert_hf_to_gguf.py")
        # With this environment's torch and transformers, which the peers' has not.
        run_step([sys.executable, program, model, "--outtype", "f16", "--outfile", str(partial)])
        partial.rename(file)
    return file


def llama_cpp(gguf: Path, requests: int) -> dict[str, Any]:
    """What starts llama.cpp's server, built for this machine where it is not there."""
    folder = sources()
    binary = folder / "build" / "bin" / "llama-server"
    if not binary.exists():
        path = os.pathsep.join([str(environment().absolute()), os.environ.get("PATH", "")])
        off = [f"-D{part}=OFF" for part in
               ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "BUILD_SHARED_LIBS")]  # fmt: skip
        how = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *off]
        run_step(["cmake", "-B", "build", "-G", "Ninja", *how], cwd=folder, path=path)
        run_step(["cmake", "--build", "build", "--target", "llama-server"], cwd=folder, path=path)
    cores = str(len(os.sched_getaffinity(0)))
    words = [str(binary), "-m", str(gguf), "--alias", gguf.stem, "-t", cores, "-tb", cores]
    words += ["-np", str(requests), "-c", str(requests * LONGEST), "-b", "2048", "-ub", "512"]
    # Its defaults, a top-k of 40 and a min-p of 0.05, would leave a top-p nothing to do.
    words += ["--top-k", "0", "--min-p", "0", "-fa", "on", "--no-cache-prompt"]
    return {"command": words, "env": {}, "url": ""}


def openvino(gguf: Path, settings: list[tuple[str, str, int]]) -> list[float]:
    """Tokens/s of OpenVINO GenAI for each load, in a process of its own."""
    loads = [
        {"prompt": TOKENS[name][0], "tokens": TOKENS[name][1], "requests": count, **SAMPLING[way]}
        for name, way, count in settings
    ]
    command = [str(environment() / "python"), str(ALONE), str(gguf), json.dumps(loads)]
    print("measuring OpenVINO ...", file=sys.stderr, flush=True)
    said = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=60 * MINUTES, check=False, text=True
    )
    if said.returncode:
        raise SiPipeError(f"OpenVINO ended with status {said.returncode}")
    figures: list[float] = json.loads(said.stdout.splitlines()[-1])
    return figures


def run_step(command: list[str], cwd: Path | None = None, path: str = "") -> None:
    """Run a step of the installation. Raises SiPipeError: it failed."""
    print("peers:", " ".join(command), file=sys.stderr, flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PATH": path or os.environ.get("PATH", "")}
    try:
        # wait: MINUTES; the program's end
        subprocess.run(
            command, cwd=cwd, env=env, stdout=sys.stderr, timeout=60 * MINUTES, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SiPipeError(f"peers: {command[0]}: {error}") from None


if __name__ == "__main__":
    try:
        main()
    except SiPipeError as error:
        sys.exit(str(error))
