"""Whether threads sleep: by what the kernel counts of them, not by the time that they take."""

import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

SECONDS, LOOKS = 1.0, 20
MOST = 50
"""Times that a thread may be woken meanwhile: one that looks every 10 ms is woken 100 times."""


def restless(pid: int, among: Collection[int] | None = None) -> list[str]:
    """Threads of a process (``among``: these) that run, or are woken again and again."""
    before, running = _threads(pid), Counter[int]()
    for _ in range(LOOKS):
        time.sleep(SECONDS / LOOKS)
        now = _threads(pid)
        running.update(thread for thread, (_, state, _) in now.items() if state == "R")
    return [
        f"{name}: woken {wakes - before[thread][2]} times, runs at {running[thread]} of {LOOKS} looks"
        for thread, (name, _, wakes) in now.items()
        if thread in before and (among is None or thread in among)
        and (wakes - before[thread][2] > MOST or running[thread] > LOOKS // 2)
    ]  # fmt: skip


def _threads(pid: int) -> dict[int, tuple[str, str, int]]:
    """By number: name, state, and how often it has been switched."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (line.split(":", 1) for line in (task / "status").read_text().splitlines())
        said = {key: value.split() for key, value in lines}
        switches = sum(int(said[f"{kind}voluntary_ctxt_switches"][0]) for kind in ("", "non"))
        found[int(task.name)] = (said["Name"][0], said["State"][0], switches)
    return found
