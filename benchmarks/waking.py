"""How late a thread wakes up on a CPU on which another process computes, and in a process whose main
thread computes in Python: as the kernel and Python have it, and after :func:`sipipe.cores.run_soon`.

    python -m benchmarks.waking

Waits of 4 ms, each followed by 0.4 ms of work, as a sampler has it; eight turns of each side. The main
thread computes for 2 ms and sleeps for 1, as the engine's does while it schedules.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from itertools import product

from benchmarks.harness import report

WAIT, WORK, TIMES = 4e-3, 4e-4, 500
HOG = "while True: pass"
BESIDE = ("a process", "the main thread")
SIDES = {"as it is": "", "run_soon": "from sipipe.cores import run_soon; run_soon()"}
SLEEPER = f"""
import sys, threading, time
late = []
def compute(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
def sleep():
    for _ in range({TIMES}):
        began = time.perf_counter()
        time.sleep({WAIT})
        late.append(time.perf_counter() - began - {WAIT})
        compute({WORK})
if sys.argv[1] == "a process":
    sleep()
else:
    thread = threading.Thread(target=sleep)
    thread.start()
    while thread.is_alive():
        compute(2e-3)
        time.sleep(1e-3)
print(*late)
"""


def main() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    late: dict[tuple[str, str], list[float]] = {}
    for beside, _, (side, before) in product(BESIDE, range(8), SIDES.items()):
        os.sched_setaffinity(0, cpus if beside != BESIDE[0] else cpus[-1:])
        hog = subprocess.Popen([sys.executable, "-c", HOG]) if beside == BESIDE[0] else None
        try:
            words = [sys.executable, "-c", f"{before}\n{SLEEPER}", beside]
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            late.setdefault((beside, side), []).extend(map(float, said.split()))
        finally:
            if hog is not None:
                hog.kill()
                hog.wait()
    rows = []
    for (beside, side), found in late.items():
        found.sort()
        shares = {f"p{share}, us": found[len(found) * share // 100] for share in (50, 90, 95, 99)}
        row = {"computes": beside, "thread": side}
        row |= {name: round(each * 1e6) for name, each in shares.items()}
        over = 100 * sum(each > 1e-3 for each in found) / len(found)
        rows.append(row | {"over 1 ms, %": round(over, 2)})
    note = (
        "a process: on the same CPU; the main thread: of its own process, on any CPU; "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )
    report("waking", "How late a thread wakes up", rows, note=note)


if __name__ == "__main__":
    main()
