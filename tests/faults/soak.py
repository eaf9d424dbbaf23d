"""``make soak``: a server under clients that come and go, and whether anything of it grows.

One ``sipipe serve`` with a tiny model in two stages. Clients stream, give up, never read, ask for
what is refused or cannot be drawn, and ask again what they asked before, which has to be token for
token the same. Every few minutes the server rests, and what it holds is counted. ``--minutes 30 --keep``
writes soak.json and the table in README.md beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
NAMES = {
    r"-m sipipe serve": "supervisor",
    r"sipipe\.engine\.server": "front end",
    r"EngineCore": "engine",
    r"Worker_PP(\d)": "stage worker {}",
    r"sipipe\.sampler.* spare": "spare sampler",
    r"sipipe\.sampler": "sampler",
    r"resource_tracker": "Python's resource tracker",
}
PARTS = 6
"""The run is so many loads, each with a rest behind it."""
T95 = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}
SLICES = 26
"""Means of so many stretches of time stand for the memory; their rests are hardly correlated."""


class Look:
    """What the processes of a server hold, again and again."""

    def __init__(self, pid):
        self._main = psutil.Process(pid)
        self.memory = {}
        """By process: (seconds, bytes of its own memory)."""

    def processes(self):
        found = {}
        for process in [self._main, *self._main.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                for pattern, name in NAMES.items():
                    if said := re.search(pattern, line):
                        name = name.format(*said.groups())
                        same = sum(key.startswith(name) for key in found)
                        found[f"{name} {same}" if name == "sampler" or same else name] = process
                        break
                else:
                    found[f"{line} {process.pid}"] = process
        return found

    def weigh(self):
        for name, process in self.processes().items():
            with contextlib.suppress(psutil.Error):
                own = process.memory_full_info().uss
                self.memory.setdefault(name, []).append((time.monotonic(), own))

    def count(self):
        """By process: descriptors, threads; segments of shared memory, and named semaphores."""
        held = {}
        for name, process in self.processes().items():
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            shared = re.findall(r" (\S+) (\d+) +(?:/dev/shm/|/memfd:)(\S*)", maps)
            held[name] = {
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "segments": len({(device, node) for device, node, _ in shared}),
                "semaphores": len({node for _, node, called in shared if called[:4] == "sem."}),
            }
        return held


def slope(points):
    """KiB a minute, and the half-width of its 95 % confidence interval, of (seconds, bytes)."""
    first, last = points[0][0], points[-1][0]
    count = min(SLICES, len(points) // 2)
    if count < 6:
        return None
    stretches = [[] for _ in range(count)]
    for at, size in points:
        stretches[min(count - 1, int((at - first) / (last - first) * count))].append((at, size))
    x = [statistics.fmean(at for at, _ in part) / 60 for part in stretches if part]
    y = [statistics.fmean(size for _, size in part) / 1024 for part in stretches if part]
    rise, start = statistics.linear_regression(x, y)
    rest = sum((b - start - rise * a) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    error = (rest / sum((a - statistics.fmean(x)) ** 2 for a in x)) ** 0.5
    return rise, T95[max(degrees for degrees in T95 if degrees <= max(4, len(x) - 2))] * error


async def ask(session, address, index, rng, known, ends):
    """One client; counts in ``ends`` how it went."""
    from tests.engine.servers import MODEL, stream
    from tests.faults.clients import never_reads

    kind = rng.random()
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 4}
    if kind < 0.4:
        ends[await stream(session, address, index, rng, MODEL)] += 1
        return
    if kind < 0.5:
        refused = body | {"max_tokens": -1}
        async with session.post(f"{address}/v1/completions", json=refused) as answer:
            ends["refused" if answer.status == 400 else "WRONG"] += 1
        return
    if kind < 0.53:
        with never_reads(address, rng, None):
            await asyncio.sleep(rng.uniform(1, 20))
        ends["never read"] += 1
        return
    if kind < 0.58:
        failing = {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}
        async with session.post(f"{address}/v1/completions", json=body | failing) as answer:
            said = await answer.text()
            ends["failed alone" if "no token is left" in said else "WRONG"] += 1
        return
    asked, expected = known[rng.randrange(len(known))]
    found = await exact(session, address, asked)
    ends["exact" if found == expected else "WRONG"] += 1


async def exact(session, address, asked):
    async with session.post(f"{address}/v1/completions", json=asked) as answer:
        said = (await answer.json())["choices"][0]
    return [int(token.removeprefix("token_id:")) for token in said["logprobs"]["tokens"]]


def questions(rng):
    """Requests whose tokens are the same each time."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 4, "logprobs": 5},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {"9": 3.0}},
    ]
    for index in range(16):
        yield {
            "model": "tiny",
            "prompt": [rng.randrange(3, 900) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(8, 40),
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            **kinds[index % len(kinds)],
        }


async def soak(address, pid, seconds, rate, seed):
    import aiohttp
    from tests.engine.servers import metric

    rng, look = random.Random(seed), Look(pid)
    ends, counts = Counter(), []
    timeout = aiohttp.ClientTimeout(total=120)

    def connect():  # some clients keep their connections, and others do not
        connector = aiohttp.TCPConnector(limit=0, force_close=rng.random() < 0.5)
        return aiohttp.ClientSession(timeout=timeout, connector=connector)

    async with connect() as session:
        known = [(q, await exact(session, address, q)) for q in questions(rng)]
        for asked, expected in known:
            assert await exact(session, address, asked) == expected
    began = time.monotonic()
    index = 0
    for part in range(PARTS):
        until, weighed, going = began + seconds * (part + 1) / PARTS, 0.0, set()
        async with connect() as session:
            while (now := time.monotonic()) < until:
                if now - weighed > min(5.0, seconds / 200):
                    weighed = now
                    await asyncio.to_thread(look.weigh)
                if len(going) < 64:
                    index += 1
                    client = ask(session, address, index, random.Random(index), known, ends)
                    going.add(task := asyncio.create_task(client))
                    task.add_done_callback(going.discard)
                await asyncio.sleep(rng.expovariate(rate))
            await asyncio.gather(*going)
        while await asyncio.to_thread(metric, address, "vllm:num_requests_running"):
            await asyncio.sleep(0.2)
        await asyncio.sleep(min(10.0, seconds / 30))  # what was kept alive for a while has gone
        counts.append(look.count())
        held = {name: tuple(held.values()) for name, held in counts[-1].items()}
        print(f"{time.monotonic() - began:6.0f} s {dict(ends)} {held}", flush=True)
    return look.memory, counts, dict(ends)


def rows(memory, counts):
    """By process. Memory counts from the first rest on, when pools and caches are full."""
    found = []
    for name, points in memory.items():
        first, last = counts[0].get(name), counts[-1].get(name)
        if first is None or last is None:
            continue
        settled = points[len(points) // PARTS :]
        rise = slope(settled)
        found.append(
            {
                "process": name,
                "memory_mib": round(settled[-1][1] / 2**20, 1),
                "slope_kib_min": rise and [round(value, 2) for value in rise],
                "first": first,
                "last": last,
            }
        )
    return found


def markdown(kept):
    """The table of README.md, of what soak.json holds."""
    asked = ", ".join(f"{count:,} {end}" for end, count in sorted(kept["ends"].items()))
    held = f"{kept['minutes']:g} minutes, {sum(kept['ends'].values()):,} requests ({asked})"
    heads = ("process", "own memory, MiB", "slope, KiB a minute (95 %)")
    heads += ("descriptors", "threads", "segments", "semaphores")
    lines = [f"{held}; {kept['machine']}, {kept['date']}.", "", f"| {' | '.join(heads)} |"]
    lines += ["| --- | " + "--: | " * (len(heads) - 2) + "--: |"]
    for row in kept["rows"]:
        rise = row["slope_kib_min"]
        cells = [row["process"], f"{row['memory_mib']:,}"]
        cells.append(f"{rise[0]:+.1f} ± {rise[1]:.1f}" if rise else "")
        for what, first in row["first"].items():
            last = row["last"][what]
            cells.append(str(first) if first == last else f"{first} → {last}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """0: no answer was wrong, no process came or went, and nothing that is counted grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write soak.json and the page")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.engine.engines import model
    from tests.engine.servers import Server
    from tests.faults.suite import keep, machine

    scratch = Path(tempfile.mkdtemp(prefix="soak"))
    serve = ("--enforce-eager", "--max-model-len", "256", "--dtype", "float32")
    serve += ("--max-num-seqs", "32", "--samplers", "2", "--cores", "off")
    serve += ("--num-gpu-blocks-override", "64")  # all are soon in use: memory touched is resident
    with Server(model(scratch), scratch / "log", *serve, temporary=scratch) as server:
        run = soak(
            server.address, server.process.pid, options.minutes * 60, options.rate, options.seed
        )
        memory, counts, ends = asyncio.run(run)
    shutil.rmtree(scratch, ignore_errors=True)
    kept = {"minutes": options.minutes, "rate": options.rate, "machine": machine()}
    kept |= {"date": time.strftime("%Y-%m-%d"), "ends": ends, "rows": rows(memory, counts)}
    kept["rests"] = counts
    kept["memory_mib_each_minute"] = {
        name: [round(size / 2**20, 2) for _, size in points[::12]]
        for name, points in memory.items()
    }
    print(markdown(kept))
    if options.keep:
        keep("soak", kept, markdown(kept))
    grown = [
        row for row in kept["rows"] if any(row["last"][k] > n for k, n in row["first"].items())
    ]
    for row in grown:
        print(f"{row['process']} holds more: {row['first']}, {row['last']}")
    return int(bool(grown or ends.get("WRONG") or set(counts[0]) != set(counts[-1])))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
