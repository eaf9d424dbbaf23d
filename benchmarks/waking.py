"""How late a thread wakes up on a CPU on which another process computes: as the kernel has it, and
after :func:`sipipe.cores.run_soon`.

    python -m benchmarks.waking

Waits of 4 ms, each followed by 0.4 ms of work, as a sampler has it; eight turns of each side.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from itertools import product

from benchmarks.harness import report

WAIT, WORK, TIMES = 4e-3, 4e-4, 500
HOG = "while True: pass"
SIDES = {"as the kernel has it": "", "run_soon": "from sipipe.cores import run_soon; run_soon()"}
SLEEPER = f"""
import time
late = []
for _ in range({TIMES}):
    began = time.perf_counter()
    time.sleep({WAIT})
    late.append(time.perf_counter() - began - {WAIT})
    until = time.perf_counter() + {WORK}
    while time.perf_counter() < until:
        pass
print(*late)
"""


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    late: dict[str, list[float]] = {side: [] for side in SIDES}
    hog = subprocess.Popen([sys.executable, "-c", HOG])
    try:
        time.sleep(0.5)
        for _, (side, before) in product(range(8), SIDES.items()):
            words = [sys.executable, "-c", before + SLEEPER]
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            late[side] += map(float, said.split())
    finally:
        hog.kill()
        hog.wait()
    rows = []
    for side, found in late.items():
        found.sort()
        shares = {f"p{share}, us": found[len(found) * share // 100] for share in (50, 90, 95, 99)}
        row = {"thread": side} | {name: round(each * 1e6) for name, each in shares.items()}
        over = 100 * sum(each > 1e-3 for each in found) / len(found)
        rows.append(row | {"over 1 ms, %": round(over, 2)})
    note = (
        f"beside a process that computes on the same CPU; Linux {platform.release().split('-')[0]}"
    )
    report("waking", "How late a thread wakes up", rows, note=note)


if __name__ == "__main__":
    main()
