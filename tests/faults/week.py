"""``make week``: what an engine meets in a week, as quickly as it can be had.

One engine of the suite (:mod:`tests.faults.rig`), whose model is arithmetic. Requests by the hundred
thousand find a cache that is too small for them, every tenth is aborted. Thousands of times a sampler
is killed, told to end, or stopped for a moment; now and then all processes are, and the wall clock
jumps. Every request that is not aborted is compared token for token with an engine without faults.
What processes hold is counted after each tenth, with nothing to do. ``--keep`` writes week.json
and the table in README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent
BEGIN, END = "<!-- week: generated -->", "<!-- /week -->"
STREAMS, PARTS = 32, 10
FAULTS = {"kill": 8, "stop": 4, "term": 2, "pause": 1, "clock": 1}
"""What is done, and how often of 16."""
SETTLED = 30.0
"""Seconds in which samplers are whole again, and nothing is asked."""


def serve(core, scenario, said, report):
    """In place of the suite's way to drive an engine."""
    from sipipe.engine import samplers

    samplers.DEATHS_WINDOW = (
        0.0  # a fifth death within a minute ends an engine; in a week they are rarer
    )
    week = Week(core, scenario["week"], report)
    for _ in range(PARTS):
        week.part()
        said["looks"] = [*said.get("looks", ()), week.look()]
    said["counts"] = dict(week.counts)


class Week:
    """Drives one engine."""

    def __init__(self, core, asked, report):
        from tests.faults.engine import requests

        self._core, self._asked, self._report = core, asked, report
        self._chances = random.Random(asked["seed"])
        self._known = list(requests(STREAMS, sampling=True))
        self._numbers = itertools.count()
        self._live, self._stopped = {}, []
        self._real, self._steps, self._seconds = time.time, 0, 0.0
        self.counts = Counter()

    def part(self):
        """A tenth of the requests, with a tenth of the faults between them."""
        left = self._asked["requests"] // PARTS
        every = max(1, self._asked["requests"] // self._asked["faults"])
        self._steps, self._seconds = 0, 0.0
        while left or self._live:
            while left and len(self._live) < STREAMS:
                left -= 1
                self._add()
                if left % every == 0:
                    self._strike()
            self._step()

    def _add(self):
        from vllm.v1.request import Request

        number = next(self._numbers)
        known = self._known[number % STREAMS]
        request = Request(
            str(number),
            known.prompt_token_ids,
            known.sampling_params.clone(),
            pooling_params=None,
            block_hasher=known._block_hasher,
        )
        ends = self._chances.randrange(12) if self._chances.random() < 0.1 else -1
        self._live[request.request_id] = [known.request_id, [], ends]
        self._core.add_request(request)

    def _step(self):
        for process, step in self._stopped[:]:
            if self._steps >= step:
                self._stopped.remove((process, step))
                with contextlib.suppress(psutil.Error):
                    process.resume()
        began = time.monotonic()
        outputs, _ = self._core.step_fn()
        self._core.post_step(bool(outputs))
        self._steps += 1
        self._seconds += time.monotonic() - began
        for output in (output for one in (outputs or {}).values() for output in one.outputs):
            if (entry := self._live.get(output.request_id)) is None:
                continue
            known, tokens, ends = entry
            tokens += output.new_token_ids
            expected = self._asked["expected"][known]
            assert tokens == expected[: len(tokens)], f"request {output.request_id}: {tokens}"
            if output.finish_reason is not None:
                assert len(tokens) == len(expected), f"request {output.request_id} is short"
                self._end(output.request_id, "done")
            elif 0 <= ends < len(tokens):
                self._core.abort_requests([output.request_id])
                self._end(output.request_id, "aborted")

    def _end(self, request_id, how):
        del self._live[request_id]
        self.counts[how] += 1

    def _strike(self):
        from tests.faults.engine import _children

        what = self._chances.choices([*FAULTS], [*FAULTS.values()])[0]
        children = {
            n: c.process for n, c in _children(self._core).copy().items() if "spare" not in n
        }
        names = [*children] if what == "pause" else [n for n in children if "sampler" in n]
        if what == "clock":
            seconds = self._chances.choice((-3600, 3600))
            time.time = lambda: self._real() + seconds
        elif what == "pause":
            self._stop(children.values(), 0)
            time.sleep(0.05)
        else:
            child = children[self._chances.choice(names)]
            if child.returncode is not None:
                return
            if what == "stop":
                self._stop([child], 3)
            else:
                os.kill(child.pid, signal.SIGKILL if what == "kill" else signal.SIGTERM)
        self.counts[what] += 1

    def _stop(self, children, steps):
        for child in children:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(child.pid)
                process.suspend()
                self._stopped.append((process, self._steps + steps))

    def look(self):
        """By process: MiB of its own, descriptors, threads; names in /dev/shm; milliseconds a step."""
        from tests.faults.engine import _children

        until = time.monotonic() + SETTLED
        while time.monotonic() < until and "spare" not in _children(self._core):
            self._core.model_executor.check_health()
            time.sleep(0.05)
        time.sleep(1.0)
        held = {}
        for name, number in {
            "engine": os.getpid(),
            **{name: child.process.pid for name, child in _children(self._core).copy().items()},
        }.items():
            process = psutil.Process(number)
            own = process.memory_full_info().uss / 2**20
            held[name] = [round(own, 1), process.num_fds(), process.num_threads()]
        return {
            "held": held,
            "names": len(os.listdir("/dev/shm")),
            "step_ms": round(1e3 * self._seconds / max(1, self._steps), 3),
        }


def markdown(kept):
    """The table of README.md, of what week.json holds."""
    counts, looks = kept["counts"], kept["looks"]
    done = ", ".join(f"{counts.get(k, 0):,} {word}" for k, word in WORDS.items())
    first, last = looks[0], looks[-1]
    said = f"{kept['requests']:,} requests: {done}; {kept['minutes']} minutes; {kept['machine']}, {kept['date']}."
    lines = [said, "", "| process | own memory, MiB | descriptors | threads |"]
    lines.append("| --- | --: | --: | --: |")
    for name, values in first["held"].items():
        cells = [
            str(a) if a == b else f"{a} → {b}"
            for a, b in zip(values, last["held"].get(name, ["gone"] * 3), strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    names, steps = ([look[what] for look in (first, last)] for what in ("names", "step_ms"))
    beside = f"Names in /dev/shm: {names[0]} → {names[1]}. A step of the engine: {steps[0]} → {steps[1]} ms."
    lines += ["", beside]
    return "\n".join(lines)


WORDS = {
    "done": "done and exact",
    "aborted": "aborted",
    "kill": "samplers killed",
    "term": "told to end",
    "stop": "stopped for a moment",
    "pause": "pauses of all processes",
    "clock": "jumps of the clock",
}


def page(text, kept):
    """README.md with this table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(kept)}\n\n{END}{rest.split(END)[1]}"


def grown(looks):
    """What is counted and is more in the last look than in the first; memory by a tenth and 8 MiB."""
    first, last = looks[0], looks[-1]
    found = ["names in /dev/shm"] if last["names"] > first["names"] else []
    for name, (own, *counts) in first["held"].items():
        more, *now = last["held"].get(name, [0.0, 0, 0])
        if any(b > a for a, b in zip(counts, now, strict=True)) or more > own * 1.1 + 8:
            found.append(f"{name}: {first['held'][name]}, {last['held'].get(name)}")
    return found


def main():
    """0: no token was wrong, nothing hung, and nothing that is counted grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.week")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write week.json and the page")
    options = parser.parse_args()
    from tests.faults.kinds import scenario
    from tests.faults.rig import run_all
    from tests.faults.suite import machine

    asked = {"requests": options.requests, "faults": options.faults, "seed": options.seed}
    whole = scenario(bound=1e9, spare=0.0) | {"kind": "week", "crowded": True, "week": asked}
    began, outcomes = time.monotonic(), []

    def each(outcome):
        outcomes.append(outcome)
        asked["expected"] = asked.get("expected") or outcome["tokens"]

    run_all([{"kind": "", "streams": STREAMS} | scenario(), whole], parallel=1, each=each)
    found = outcomes[-1]
    kept = {
        "requests": options.requests,
        "minutes": round((time.monotonic() - began) / 60),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "counts": found["said"].get("counts", {}),
        "looks": found["said"].get("looks", []),
    }
    bad = [found["error"], found["shutdown"], *map(str, found["left"]), "hung" * found["hung"]]
    bad = [*filter(None, bad), *(grown(kept["looks"]) if kept["looks"] else ["nothing was seen"])]
    if kept["looks"]:
        print(markdown(kept))
    print(*bad, sep="\n")
    if options.keep and not bad:
        (KEPT / "week.json").write_text(json.dumps(kept, indent=1) + "\n")
        file = KEPT / "README.md"
        file.write_text(page(file.read_text(), kept))
    return int(bool(bad))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
