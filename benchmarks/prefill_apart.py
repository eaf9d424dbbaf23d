"""Prompts in two stages and tokens elsewhere, beside one engine of two stages that does both.

    python -m benchmarks.prefill_apart MODEL [--minutes 30] [--decoders 1] [--rate 0.4] [--quick]

*apart* is docs/prefill.md's: a prefill server, decoders of one stage, the router, files between them.
*together* is one server, whose prompts come in chunks. All of them hold the machine's cores at the
same time; one side is asked, for a turn, while the other one sleeps. Requests come at random, with
prompts of 70 to 1,330 tokens and answers of 32 to 96. A turn's files are removed after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import BUILD, of_the_checkout, report
from benchmarks.one_gpu import _server
from sipipe.cli.bench_rows import server_job
from sipipe.errors import SiPipeError
from sipipe.tools import load
from sipipe.tools.child import answer, measured

MODULE = "benchmarks.prefill_apart"
ROUTER = Path(__file__).parents[1] / "deploy" / "prefill_router.py"
ORDER = ("apart", "together", "together", "apart", "apart", "together")
LONG = 1000
"""Tokens of prompts that have figures of their own."""
SENT = (
    "--dataset-name random --random-input-len 700 --random-output-len 64 --ignore-eos "
    '--random-range-ratio {"input":0.9,"output":0.5} --temperature 0 --disable-tqdm --save-detailed'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="build/models/SmolLM2-135M-Instruct", metavar="MODEL")
    add("--minutes", type=float, default=30.0, help="of load, of both sides together (default: 30)")
    add("--decoders", type=int, default=1, help="of one stage (default: 1)")
    add("--rate", type=float, default=0.4, help="requests a second (default: 0.4)")
    add("--quick", action="store_true", help="a turn of half a minute for each side")
    args = parser.parse_args()
    order = ORDER[:2] if args.quick else ORDER
    seconds = 30.0 if args.quick else 60 * args.minutes / len(order)
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="caches-") as store:
        whole = ["--max-model-len", "2048", "--block-size", "32"]
        connector = {
            "kv_connector": "KVFiles",
            "kv_connector_module_path": "sipipe.kv_files.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"directory": str(Path(store).resolve()), "size_gib": 10},
        }
        apart = [*whole, "--kv-transfer-config", json.dumps(connector)]
        job: dict[str, Any] = {
            "model": args.model,
            "store": store,
            "order": order,
            "count": max(4, round(seconds * args.rate)),
            "rate": args.rate,
            "together": server_job([args.model, *whole], ["--pp", "2"]),
            "prefill": server_job([args.model, *apart], ["--pp", "2"]),
            "decode": [server_job([args.model, *apart], ["--pp", "1"])] * args.decoders,
        }
        limit = 60 * args.minutes + 3600
        found = measured("both sides in turn", job, of_the_checkout(MODULE), timeout=limit)
    title = f"Prefill apart, {Path(args.model).name}, {args.rate:g} requests/s"
    note = (
        f"together: one server of 2 stages; apart: 2 stages prefill, {args.decoders} decoder(s) of 1, files "
        f"between; the same cores; prompts of 70 to 1,330 tokens, answers of 32 to 96; ms; {LONG}+: "
        f"prompts so long; loaded: of the prompts' tokens; {len(order)} turns of {seconds:g} s"
    )
    rows = [row_of(side, found[side]) for side in ("together", "apart")]
    report("prefill-apart", title, rows, note=note, columns=list(rows[0]))


def row_of(side: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all requests of a side's turns."""
    first, each, prompts = (
        np.array([value for turn in turns for value in turn[key]])
        for key in ("ttfts", "tpots", "input_lens")
    )
    row: dict[str, Any] = {"engine": side, "requests": len(first)}
    made, took = (sum(turn[key] for turn in turns) for key in ("total_output_tokens", "duration"))
    row["tok/s"] = round(made / took, 1)
    for name, values in (("TTFT", first), ("TPOT", each), (f"TTFT {LONG}+", first[prompts >= LONG])):  # fmt: skip
        for q in (50, 99):
            row[f"{name} p{q}"] = round(1e3 * np.percentile(values, q)) if len(values) else None
    loaded = sum(turn["loaded"] for turn in turns)
    return row | {"loaded, %": round(100 * loaded / prompts.sum()) if side == "apart" else None}


def driven(job: dict[str, Any]) -> dict[str, Any]:
    """The other end: all servers, and the turns of each side."""
    names = ("together", "prefill")
    started = [_server(**job[name]) for name in names] + [_server(**one) for one in job["decode"]]
    with ThreadPoolExecutor(len(started)) as pool:
        list(pool.map(lambda one: load._wait(one[1], one[0], None), started))
    (_, together), (_, prefill), *decoders = started
    told = [word for _, url in decoders for word in ("--decode", url)]
    command = [sys.executable, str(ROUTER), "--prefill", prefill, *told]
    router, apart = _server(command=command, env={}, url="")
    load._wait(apart, router, None)
    urls = {"together": together, "apart": apart}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in urls}
    for url in urls.values():  # warms up
        asked(job, url, 8, seed=0)
    for turn, side in enumerate(job["order"]):
        before = sum(hits(url) for _, url in decoders)
        said = asked(job, urls[side], job["count"], seed=1 + turn // 2)
        said["loaded"] = sum(hits(url) for _, url in decoders) - before
        found[side].append(said)
        subprocess.run(["find", job["store"], "-mindepth", "1", "-delete"], check=True)
    return found


def asked(job: dict[str, Any], url: str, count: int, seed: int) -> dict[str, Any]:
    """What vLLM's client says of each request, seconds. Raises SiPipeError: one failed."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    argv = [*SENT.split(), "--base-url", url, "--model", job["model"], "--seed", str(seed)]
    argv += ["--num-prompts", str(count), "--request-rate", str(job["rate"])]
    said: dict[str, Any] = asyncio.run(main_async(parser.parse_args(argv)))
    if said["failed"]:
        raise SiPipeError(f"{said['failed']} of {count} requests failed at {url}")
    kept = {key: said[key] for key in ("ttfts", "input_lens", "total_output_tokens", "duration")}
    return kept | {"tpots": [sum(gaps) / max(1, made - 1) for gaps, made in zip(said["itls"], said["output_lens"], strict=True)]}  # fmt: skip


def hits(url: str) -> float:
    """Tokens of prompts that a server has loaded."""
    name = "vllm:external_prefix_cache_hits_total"
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", load._get(f"{url}/metrics"), re.M)))


if __name__ == "__main__":
    answer(driven) if all(map(str.isdigit, sys.argv[1:])) and sys.argv[1:] else main()
