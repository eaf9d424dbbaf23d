"""Two replicas of two stages behind one server: a process of one of them is killed or stopped amid
streams. A sampler is replaced, and no client notices. Whatever else dies ends the server, as in
vLLM: every client hears of it, the last line names the process, and nothing is left.
"""

from __future__ import annotations

import re
import signal
import time
from random import Random
from typing import Any

import psutil
from tests.faults.served import Clients, Row, amid, scratch_directory, server_options

VICTIMS = {
    "a sampler of one of two replicas is killed": (r"sampler\d", 6),
    "a worker of one of two replicas is killed": ("Worker_PP", 3),
    "the engine of one of two replicas is killed": ("EngineCore", 2),
}
"""A part of the victim's command line or name, and how many are killed."""
KINDS = VICTIMS
NAMED = r"killed|SIGKILL|exit code -9|status -9"
"""What the last line of a server says of a process that was killed."""
GONE = 30.0
"""Seconds for everybody to end, on a busy machine."""


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """A row of the table for each kind whose name matches ``only``."""
    names = [name for name in VICTIMS if re.search(only, name)]
    if not names:
        return []
    from tests.engine.engines import model
    from tests.engine.servers import Server

    rows = []
    with scratch_directory() as scratch:
        path = model(scratch)
        options = ["--data-parallel-size", "2", "--no-enable-prefix-caching", *server_options()]
        clients = Clients(8, seed)
        for name in names:
            pattern, count = VICTIMS[name]
            times = max(1, round(count * scale))
            row = Row(name)
            rng = Random(f"{seed} {name}")
            survives = pattern.startswith("sampler")
            for number in range(1 if survives else times):
                log = scratch / f"{names.index(name)}.{number}.log"
                with Server(path, log, *options, temporary=scratch) as server:
                    clients.learn(server.address)
                    if survives:
                        _replaced(row, server, clients, pattern, times, rng)
                    else:
                        _ended(row, server, clients, pattern, rng)
            rows.append(row.finished())
            each(name, rows[-1]["injected"], rows[-1]["why"])
    return rows


def _victims(server: Any, pattern: str) -> list[psutil.Process]:
    return [
        process
        for process in server.everybody()
        if re.search(pattern, process.name() + " " + " ".join(process.cmdline()))
    ]


def _replaced(
    row: Row, server: Any, clients: Clients, pattern: str, times: int, rng: Random
) -> None:
    from tests.engine.servers import health

    for _ in range(times):
        with amid(clients, server.address) as verdicts:
            time.sleep(rng.random())
            rng.choice(_victims(server, pattern)).send_signal(signal.SIGKILL)
        bad = [
            verdict
            for verdict in (*verdicts, clients.verdict(server.address))
            if verdict != "recovered"
        ]
        verdict = bad[0] if bad else "recovered"
        row.add(
            verdict if health(server.address) == 200 else "unclear", server.log.read_text()[-800:]
        )


def _ended(row: Row, server: Any, clients: Clients, pattern: str, rng: Random) -> None:
    from tests.engine.engines import gone

    everybody = server.everybody()
    with amid(clients, server.address) as verdicts:
        time.sleep(rng.random())
        rng.choice(_victims(server, pattern)).send_signal(signal.SIGKILL)
        began = time.monotonic()
        left = not gone(everybody, seconds=GONE)
        took = time.monotonic() - began
    last = server.log.read_text(errors="replace").rstrip().splitlines()[-1]
    if left:
        row.add(
            "leaked", f"left: {[process for process in everybody if process.is_running()]}; {last}"
        )
    elif "hung" in verdicts or "wrong" in verdicts:
        row.add("hung" if "hung" in verdicts else "wrong", str(verdicts))
    elif re.search(NAMED, last):
        row.add("error", seconds=took)
    else:
        row.add("unclear", f"the last line: {last}")
