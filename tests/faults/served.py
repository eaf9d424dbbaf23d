"""What the kinds about whole servers share: a row of the table, and clients that are looked at."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERDICTS = ("recovered", "error", "hung", "wrong", "leaked", "unclear")
ASKED = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}


class Row:
    """The counts of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.counts = dict.fromkeys(VERDICTS, 0)
        self.seconds: list[float] = []
        """From each fault to its error."""
        self.why: list[str] = []
        """What went wrong, a line each."""

    def add(self, verdict: str, why: str = "", seconds: float | None = None) -> None:
        """Count one fault. ``why``: kept where the verdict is a bad one."""
        self.counts[verdict] += 1
        if seconds is not None:
            self.seconds.append(seconds)
        if verdict not in ("recovered", "error"):
            self.why.append(why)

    def finished(self) -> dict[str, Any]:
        """The row as faults.json has it."""
        return {
            "kind": self.kind,
            "injected": sum(self.counts.values()),
            **self.counts,
            "median_s": round(statistics.median(self.seconds), 1) if self.seconds else None,
            "longest_s": round(max(self.seconds), 1) if self.seconds else None,
            "why": self.why,
        }


class Clients:
    """A few greedy streams at once, and the tokens that each has of a quiet server.

    ``longest``: tokens of the longest prompt.
    """

    def __init__(self, count: int, seed: int, *, longest: int = 40) -> None:
        from tests.engine.engines import prompts

        self.prompts = prompts(count, longest=longest, seed=seed)
        self._pool = ThreadPoolExecutor(count)
        self.expected: list[list[int]] = []

    def learn(self, address: str) -> None:
        """Ask a quiet server for the right tokens."""
        self.expected = self._ask(address)

    def verdict(self, address: str) -> str:
        """What becomes of the streams now."""
        try:
            return "recovered" if self._ask(address) == self.expected else "wrong"
        except OSError as error:
            return "hung" if isinstance(error, TimeoutError) else "unclear"

    def _ask(self, address: str) -> list[list[int]]:
        from tests.engine.servers import complete

        return list(
            self._pool.map(lambda prompt: complete(address, prompt, ASKED)[0], self.prompts)
        )


@contextmanager
def amid(clients: Clients, address: str) -> Iterator[list[str]]:
    """Streams without a pause while the body runs; their verdicts, complete when it has ended."""
    verdicts: list[str] = []
    ending = threading.Event()

    def stream() -> None:
        while not ending.is_set():
            verdicts.append(clients.verdict(address))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield verdicts
    finally:
        ending.set()
        thread.join()  # wait: ``complete``'s 60 s; the streams end


def server_options() -> list[str]:
    """Options of a server with a tiny model that starts soon."""
    return ["--max-model-len", "256", "--dtype", "float32", "--enforce-eager", "--cores", "off"]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for a server, removed in the end."""
    path = Path(tempfile.mkdtemp(prefix="f"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
