"""``make week``: what an engine meets in a week, as quickly as it can be had.

One engine of the suite (:mod:`tests.faults.rig`), whose model is arithmetic. Requests by the hundred
thousand find a cache that is too small for them, every tenth is aborted. Ten thousand times a sampler
is killed, told to end, or stopped; now and then all processes are stopped, the wall clock jumps, the
log is rotated, and there is no memory. None of this waits for the one before. Every request that is
not aborted is compared token for token with an engine without faults. What processes hold is counted
after each tenth, with nothing to do. ``--keep`` writes week.json and the table in README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STREAMS = 32
LENGTHS = (1, 2, 4, 8, 32)
FAULTS = {"kill": 16, "stop": 6, "term": 2, "hold": 1}
FAULTS |= {"pause": 1, "clock": 2, "rotate": 2, "memory": 1, "fill": 1}
"""What is done, and how often of 32; the first of one sampler."""
MOMENT = 0.05
"""Seconds for which somebody is stopped, or is without memory."""
SETTLED, REST = 30.0, 1.0
"""Seconds in which samplers are whole again, and for which nothing is asked then."""
SLOWER, LONG = 1.5, 10_000
"""A step may use so many times what it used in the first tenth: other processes disturb it.
Of fewer requests than these nothing can be said."""
FULL = 16 << 20
"""A larger /dev/shm is not this engine's own, and is not filled."""


def serve(core, scenario, said, report):
    """In place of the suite's way to drive an engine."""
    from sipipe.engine.children import samplers

    # A fifth death within a minute ends an engine, and two amid one request end that. A sampler
    # that does nothing has longer the second time. In a week they are further apart.
    samplers.DEATHS_WINDOW = samplers.STUCK_WINDOW = 0.0
    samplers.STRIKES = 100
    samplers.STUCK_SECONDS = samplers.LOOK_SECONDS = 0.5
    week = Week(core, scenario["week"])
    said["looks"] = []
    for _ in range(scenario["week"]["parts"]):
        week.part()
        said["looks"].append(week.look())
        said["counts"] = dict(week.counts)
        progress = f"{said['looks'][-1]} {said['counts']}\n"
        os.write(scenario["week"]["progress"], progress.encode())


class Week:
    """Drives one engine."""

    def __init__(self, core, asked):
        from tests.faults.engine import requests

        self._core, self._asked = core, asked
        self._chances = random.Random(asked["seed"])
        self._known = list(requests(STREAMS, sampling=True))
        self._numbers = itertools.count()
        self._live, self._due = {}, 0.0
        """By request: it, its tokens, those so far, and after how many it is aborted."""
        self._real, self._steps, self._used, self._unlogged = time.time, [], 0.0, 0
        self._dying = set()
        self.counts = Counter()

    def part(self):
        """A tenth of the requests, with a tenth of the faults between them."""
        left = self._asked["requests"] // self._asked["parts"]
        self._steps, used = [], self._cpu()
        self._dying.clear()
        while left or self._live:
            while left and len(self._live) < STREAMS:
                left -= 1
                self._add()
                self._due += self._asked["faults"] / self._asked["requests"]
                if self._due >= 1.0 and self.counts:  # whoever attaches at first needs memory
                    self._due -= 1.0
                    self._strike()
            self._step()
        self._used = self._cpu() - used

    def _cpu(self):
        """Seconds of a core that the engine and its stages have used, who live as long as it."""
        from tests.faults.engine import _children

        stages = [c.process.pid for n, c in _children(self._core).items() if n.startswith("stage")]
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (os.getpid(), *stages))

    def _add(self):
        from vllm.v1.request import Request

        number = next(self._numbers)
        known = self._known[number % STREAMS]
        params = known.sampling_params.clone()
        params.max_tokens = length = min(params.max_tokens, self._chances.choice(LENGTHS))
        request = Request(
            str(number),
            known.prompt_token_ids,
            params,
            pooling_params=None,
            # That of all requests for these blocks, which a request does not show.
            block_hasher=known._block_hasher,  # noqa: SLF001
        )
        ends = self._chances.randrange(length) if self._chances.random() < 0.1 else -1
        expected = self._asked["expected"][known.request_id][:length]
        self._live[request.request_id] = [request, expected, [], ends]
        self._core.add_request(request)
        if not ends:
            self._abort(request.request_id)

    def _step(self):
        began = time.monotonic()
        outputs, _ = self._core.step_fn()
        self._core.post_step(bool(outputs))
        self._steps.append(time.monotonic() - began)
        for output in (output for one in (outputs or {}).values() for output in one.outputs):
            if (entry := self._live.get(output.request_id)) is None:
                continue
            _, expected, tokens, ends = entry
            tokens += output.new_token_ids
            assert tokens == expected[: len(tokens)], f"request {output.request_id}: {tokens}"
            if output.finish_reason is not None:
                assert len(tokens) == len(expected), f"request {output.request_id} is short"
                self._end(output.request_id, "done")
            elif 0 <= ends <= len(tokens):
                self._abort(output.request_id)

    def _abort(self, request_id):
        self._core.abort_requests([request_id])
        self._end(request_id, "aborted")

    def _end(self, request_id, how):
        self.counts["preempted"] += self._live.pop(request_id)[0].num_preemptions
        self.counts[how] += 1

    def _strike(self):
        what = self._chances.choices([*FAULTS], [*FAULTS.values()])[0]
        if what == "fill" and _size("/dev/shm") > FULL:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._put(what):
                self.counts[what] += 1

    def _put(self, what):
        """Whether it was done: nobody may be there to do it to."""
        from tests.faults.engine import _children

        children = {
            n: psutil.Process(c.process.pid)
            for n, c in _children(self._core).copy().items()
            if c.process.returncode is None and c.process.pid not in self._dying
        }
        samplers = [child for name, child in children.items() if name.startswith("sampler")]
        match what:
            case "clock":
                seconds = self._chances.choice((-3600, 3600))
                time.time = lambda: self._real() + seconds
            case "rotate":
                self._rotate()
            case "fill":
                self._fill()
            case "pause":
                for process in children.values():
                    self._stop(process)
                time.sleep(MOMENT)
            case "memory":
                self._starve(self._chances.choice([*children.values()]))
            case _ if not samplers:
                return False
            case "stop":
                self._stop(self._chances.choice(samplers))
            case _:
                struck = self._chances.choice(samplers)
                struck.send_signal(DEADLY[what])
                self._dying.add(struck.pid)
                self._unlogged += what != "hold"
        return True

    def _later(self, undo):
        timer = threading.Timer(MOMENT, undo)
        timer.daemon = True
        timer.start()

    def _stop(self, process):
        process.suspend()
        self._later(partial(_quietly, process.resume))

    def _starve(self, process):
        """It gets hardly more memory, for a moment; as in :mod:`tests.faults.plan`."""
        hard = process.rlimit(psutil.RLIMIT_AS)[1]
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + (1 << 20), hard))
        self._later(partial(_quietly, process.rlimit, psutil.RLIMIT_AS, (hard, hard)))

    def _fill(self):
        """Nobody gets shared memory, for a moment."""
        filler = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        room = os.statvfs("/dev/shm")
        if room.f_bavail:
            os.posix_fallocate(filler, 0, room.f_bavail * room.f_frsize)
        self._later(partial(os.close, filler))

    def _rotate(self):
        """As logrotate does it: rename the log, or copy it and empty it."""
        log = Path(os.readlink("/proc/self/fd/1"))
        until = time.monotonic() + SETTLED
        while (said := log.read_text()).count(" died (") < self._unlogged:
            assert time.monotonic() < until, f"the log has not all of {self._unlogged} deaths"
            time.sleep(0.01)
        self._unlogged = 0
        if self._chances.random() < 0.5:
            log = log.rename(log.with_suffix(".1" if log.suffix != ".1" else ".2"))
        log.with_suffix(".old").write_text(said)
        os.truncate(log, 0)

    def look(self):
        """By process: MiB of its own, descriptors, threads; names in /dev/shm; milliseconds a step,
        by the clock (the median) and of a core."""
        from tests.faults.engine import _children
        from tests.faults.kinds import SAMPLERS

        until, whole = time.monotonic() + SETTLED, {*SAMPLERS, "spare"}
        while time.monotonic() < until and not whole <= {*_children(self._core)}:
            self._core.model_executor.check_health()
            time.sleep(0.05)
        time.sleep(REST)
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
            "step_ms": round(1e3 * statistics.median(self._steps), 3),
            "step_cpu_ms": round(1e3 * self._used / len(self._steps), 3),
        }


DEADLY = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hold": signal.SIGSTOP}


def _size(directory):
    room = os.statvfs(directory)
    return room.f_blocks * room.f_frsize


def _quietly(do, *arguments):
    """To a process that may be gone."""
    with contextlib.suppress(psutil.Error):
        do(*arguments)


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
    names, steps, used = (
        f"{first[what]} → {last[what]}" for what in ("names", "step_ms", "step_cpu_ms")
    )
    beside = f"Names in /dev/shm: {names}. A step of the engine, ms: {steps} (median)"
    lines += ["", f"{beside}, {used} of a core in engine and stages."]
    return "\n".join(lines)


WORDS = {
    "done": "done and exact",
    "aborted": "aborted",
    "preempted": "preemptions",
    "kill": "samplers killed",
    "term": "told to end",
    "hold": "stopped for ever",
    "stop": "stopped for a moment",
    "pause": "pauses of all processes",
    "clock": "jumps of the clock",
    "rotate": "rotations of the log",
    "memory": "times no memory for a process",
    "fill": "times /dev/shm full",
}


def grown(looks):
    """What is counted and is more in the last look than in the first; memory by a tenth and 8 MiB."""
    first, last = looks[0], looks[-1]
    found = ["names in /dev/shm"] if last["names"] > first["names"] else []
    for name in first["held"].keys() | last["held"].keys():
        one, other = (look["held"].get(name) for look in (first, last))
        if (one and other) is None:
            found.append(f"{name}: {one}, {other}")
            continue
        (own, *counts), (more, *now) = one, other
        if any(b > a for a, b in zip(counts, now, strict=True)) or more > own * 1.1 + 8:
            found.append(f"{name}: {one}, {other}")
    return found


def slowed(looks):
    """What a step uses of a core, where that is more in the last tenth than in the first."""
    first, last = (look["step_cpu_ms"] for look in (looks[0], looks[-1]))
    return [f"a step uses {first}, {last} ms"] if last > SLOWER * first else []


def main():
    """0: no token was wrong, nothing hung, and nothing that is counted grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.week")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", type=int, default=10, help="looks, one after each part")
    parser.add_argument("--keep", action="store_true", help="write week.json and the page")
    options = parser.parse_args()
    from tests.faults.kinds import scenario
    from tests.faults.rig import run_all
    from tests.faults.suite import keep, machine

    asked = {name: getattr(options, name) for name in ("requests", "faults", "seed", "parts")}
    asked["progress"] = os.dup(2)
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
    looks = kept["looks"]
    if len(looks) == options.parts:
        print(markdown(kept))
        bad += grown(looks) + (slowed(looks) if options.requests >= LONG else [])
    bad = [*filter(None, bad)]
    print(*bad, found["said"].get("trace", ""), sep="\n")
    print(f"SUMS {json.dumps(kept['counts'] | {'bad': len(bad)})}")
    if options.keep and not bad:
        keep("week", kept, markdown(kept))
    return int(bool(bad))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
