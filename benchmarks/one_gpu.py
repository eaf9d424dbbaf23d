"""Stages on one GPU: SiPipe's ways to draw beside stock vLLM.

All servers are started at once, which saves most of a borrowed GPU's time, and get their loads in
turn: who has none sleeps. Each has its part of the GPU's memory. Weights are random, in the shape of
an 8B model (``sipipe/tools/gpu_steps.toml``); MODEL gives the tokenizer:

    python -m benchmarks.make_model llama build/models/tiny --size tiny
    python -m benchmarks.one_gpu build/models/tiny

A row is ``stock``, ``stock-sync`` or a "cpu_sampling", behind it perhaps ``@2``: two stages on the
one GPU, each with half of its multiprocessors. That wants NVIDIA's MPS (``nvidia-cuda-mps-control
-d``), and stock what :mod:`benchmarks.shared_gpu` does. ``;`` begins further settings:

    python -m benchmarks.one_gpu build/models/tiny --rows 'stock@2|on@2|on@2;"transport":"shm"|stock'

A ratio is to the first row of as many stages. ``--large``: twelve layers of a 70B's width.

The first load of each kind compiles a server's kernels and does not count
(:mod:`benchmarks.side_by_side`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.side_by_side import Load, answered
from sipipe.cli.bench_rows import server_job
from sipipe.cli.gpu_check import TABLE

STOCK = {"stock": "stock", "stock-sync": "stock --no-async-scheduling"}
LOADS = (("greedy", 256), ("all", 256), ("chat", 256), ("greedy", 64))
OPTIONS = TABLE["load"]["large"]["options"] + (
    " --max-num-seqs 256 --stream-interval 16 --gpu-memory-utilization 0.1 "
    """--compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'"""
)
LARGE = """ --hf-overrides '{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 12,
"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
"tie_word_embeddings": false}'"""
SHARED = "--distributed-executor-backend mp --worker-extension-cls benchmarks.shared_gpu.SharedGPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model")
    add("--rows", default="stock|on|off", help=f"cpu_sampling, or of {list(STOCK)}")
    add("--options", default=OPTIONS, help="of each server")
    add("--large", action="store_true", help="twelve layers of a 70B's width")
    add("--kv-gib", type=float, default=6, help="KV cache of each server")
    add("--trace", default="", help="directory of traces, one for each of SiPipe's rows")
    add("--loads", type=json.loads, default=LOADS, help="mixes of parameters, and requests of each")
    add("--tokens", type=int, default=128, help="new ones")
    add("--repeat", type=int, default=3, help="of each load")
    args = parser.parse_args()
    words = ["--dataset-name", "random", "--random-input-len", "16", "--ignore-eos"]
    words += ["--random-output-len", str(args.tokens)]
    loads = [
        Load(
            name=f"{mix} {count}",
            sampling=mix,
            requests=count,
            rate=0.0,
            words=words,
            repeat=args.repeat,
            learnt=count,
        )
        for mix, count in args.loads
    ]
    servers = {name: server(args, name) for name in args.rows.split("|")}
    found = answered(servers, args.model, loads)
    shape, name = ("12 layers of 70B", "one-gpu-large") if args.large else ("8B", "one-gpu")
    report(
        name, f"Stages on one GPU, {shape}, random weights", rows(found),
        note="medians; of stock: tokens/s, of as many stages; TPOT: ms per output token, TTFT: to the "
        "first; servers side by side, loads in turn, decodes in CUDA graphs, no torch.compile; "
        "of two stages each has half of the multiprocessors (MPS), and stock's hidden states go "
        "by NCCL over loopback",
    )  # fmt: skip


def server(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """What starts one row's server."""
    engine, _, more = row.partition(";")
    engine, count = engine.partition("@")[0], stages_of(row)
    options = args.options + LARGE * args.large
    words = [args.model, *shlex.split(options), "--pp", f"{count}"]
    words += ["--kv-cache-memory-bytes", f"{int(args.kv_gib * 2**30 / count)}"]
    if engine in STOCK:
        job = server_job(words, [*shlex.split(STOCK[engine]), *(shlex.split(SHARED) * (count > 1))])
    else:
        settings = {"cpu_sampling": engine, "devices": [0] * count} | json.loads("{" + more + "}")
        if args.trace:
            settings["trace"] = os.path.join(args.trace, "".join(filter(str.isalnum, row)))
        job = server_job(words, ["--additional-config", json.dumps({"sipipe": settings})])
    if count > 1:
        job["env"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 // count}"
        there = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        job["env"]["PYTHONPATH"] = os.pathsep.join(there)  # benchmarks.shared_gpu
    return job


def stages_of(row: str) -> int:
    return int(row.partition(";")[0].partition("@")[2] or 1)


def rows(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A line for each load and server; ratios are to the first server of as many stages."""
    lines = []
    for load_name, by_server in found.items():
        mix, count = load_name.split()

        def middle(figure: str, name: str, by: dict[str, Any] = by_server) -> float:
            return statistics.median(run[figure] for run in by[name])

        for name, runs in by_server.items():
            stages = stages_of(name)
            first = next(other for other in by_server if stages_of(other) == stages)
            line = {"stages": stages, "sampling": mix, "requests": int(count)}
            line |= {"engine": name.replace(f"@{stages}", "")}
            speed = middle("output_throughput", name)
            line |= {"tokens/s": round(speed)}
            line["of stock"] = round(speed / middle("output_throughput", first), 2)
            for short in ("TPOT", "TTFT"):
                line[f"{short} p50"] = round(middle(f"p50_{short.lower()}_ms", name), 2)
            lines.append(line | {"runs": len(runs)})
    return lines


if __name__ == "__main__":
    main()
