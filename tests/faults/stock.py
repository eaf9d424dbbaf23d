"""The same faults in stock vLLM, as far as it can take them: two stages on CPUs, its own executor.

A real engine with a tiny model, as there is no stand-in for its worker. What it does is looked at
from outside: tokens, errors, the processes that are left. Its bound on an iteration is set to that
of SiPipe's rows, where a row is about it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import psutil
import pytest

WORKER, ENGINE = r"Worker_PP", r"EngineCore"
BOUND = 120.0
"""Seconds after which it hangs, as for SiPipe's engines."""
LEFT_SECONDS = 15.0
FOR_EVER = 1e9
NUMBERS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

KINDS = {
    "a worker is stopped for 1 s": (WORKER, "stop", {"seconds": 1}),
    "a worker is stopped for 10 s": (WORKER, "stop", {"seconds": 10}),
    "the engine is stopped for 1 s": (ENGINE, "stop", {"seconds": 1}),
    "the engine is stopped for 10 s": (ENGINE, "stop", {"seconds": 10}),
    "a busy worker is killed": (WORKER, "kill", {}),
    "an idle worker is killed": (WORKER, "kill", {"idle": True}),
    "a busy engine is killed": (ENGINE, "kill", {}),
    "a worker is killed while the engine starts": (WORKER, "kill", {"starts": True}),
    "a worker is stopped for ever": (WORKER, "stop", {"timeout": 4}),
}
"""Names of rows of SiPipe's table: who, what is done to it, and when."""


def run(names, seed, each=lambda *_: None):
    """(kind, what became of its faults: counts, and seconds to the error), one after the other."""
    from tests.engine.engines import model

    engine = None
    with tempfile.TemporaryDirectory(prefix="stock") as scratch:
        path = model(Path(scratch))
        for name in names:
            who, what, how = KINDS[name]
            rng = Random(f"{seed} {name}")
            said = dict.fromkeys(("recovered", "error", "hung", "wrong", "leaked"), 0)
            seconds = []
            for _ in range(2):
                if engine is None or {"starts", "timeout"} & set(how):
                    engine = _start(path, how.get("timeout", 60), ended=engine)
                verdict, took = _strike(engine, rng, who, what, **how)
                if verdict != "recovered":
                    engine = engine.close(0)
                said[verdict] += 1
                seconds += [took] if verdict == "error" else []
                each(name, verdict, round(took, 1))
            said["median_s"] = round(statistics.median(seconds), 1) if seconds else None
            yield name, said
        if engine is not None:
            engine.close()


def _start(path, timeout, *, ended):
    from tests.engine.engines import Engine

    if ended is not None:
        ended.close()
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1 % len(cores)]}",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(timeout),
    }
    # Its stages after the first need the warm-up, which it leaves out where it is eager.
    options = {"pipeline_parallel_size": 2, "enforce_eager": False}
    return Engine(path, env=env, **options)


def _strike(engine, rng, who, what, *, idle=False, starts=False, seconds=FOR_EVER, timeout=60):
    """One fault: what became of the engine, and after how long."""
    from tests.engine.engines import gone, prompts, tokens

    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 120}
    batch = {"prompts": prompts(32), "params": [params] * 32}
    expected = None
    if starts:
        deadline = time.monotonic() + BOUND
        while len(engine.find(who)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        expected = tokens(engine.run([batch])[0])
        if not idle:
            engine.submit([batch])
            engine.wait_until_generating()
            time.sleep(rng.uniform(0.2, 1))
    victim = rng.choice(engine.find(who))
    # Of a killed engine it is looked at when its workers are gone: vLLM's client for LLM(...) waits for
    # it for ever.
    killed_engine = who == ENGINE and what == "kill"
    everybody = engine.find(WORKER) if killed_engine else engine.descendants()
    struck = time.monotonic()
    victim.send_signal(NUMBERS[what])
    if what == "stop" and seconds < BOUND:
        time.sleep(seconds)
        victim.resume()
    if idle or starts:
        engine.submit([batch])
    verdict = "error" if killed_engine else _end(engine, expected)
    if killed_engine:
        gone(everybody, LEFT_SECONDS)
    took = time.monotonic() - struck
    if verdict == "error" and not gone(everybody, LEFT_SECONDS):
        verdict = "leaked"
    for process in everybody if verdict != "recovered" else ():
        with contextlib.suppress(psutil.Error):
            process.kill()
    return verdict, took


def _end(engine, expected):
    from tests.engine.engines import tokens

    try:
        found = tokens(engine.result(BOUND)[0])
    except pytest.fail.Exception as failed:
        return "hung" if re.match(r"no .* after", str(failed)) else "error"
    return "recovered" if expected in (None, found) else "wrong"


def cell(said):
    """One row's cell of the column: counts of what happened, and the median of seconds."""
    names = {"error": "error", "recovered": "recovered", "hung": "**hung**"}
    names |= {"wrong": "**wrong**", "leaked": "**leaked**"}
    parts = [f"{said[key]} {name}" for key, name in names.items() if said.get(key)]
    after = f", {said['median_s']} s" if said.get("median_s") is not None else ""
    return ", ".join(parts) + after
