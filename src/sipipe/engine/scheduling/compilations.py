"""Grammars are compiled beside the engine, within a bound, and none is in another's way.

vLLM compiles in (cores + 1) / 2 threads of a pool, which it waits for at its end: with one thread a
single schema of many seconds holds up every later one, also when its client has left, and SIGTERM.
:class:`Compilations` stands in the pool's place (``StructuredOutputManager.executor``).

Who runs here
    vLLM's input thread submits; the engine's thread sweeps, at each scheduling; a daemon thread for
    each grammar compiles it, and starts the next when it is done.
Guarantees
    A future is resolved once: with the grammar, with what its compilation raised, or, at the latest
    with the first sweep after its bound, with a sentence for its client. At most ``most`` grammars
    that somebody waits for are compiled at a time, and at most as many go on that were given up.
Relies on
    The backends compile without Python's lock (xgrammar, llguidance), and their cost is bounded by
    what a grammar says: a thread that was given up ends some time.
Rejected
    Killing the thread: native code cannot be stopped. A process for each grammar, which could be
    killed: it needs the tokenizer's tables and vLLM's modules (seconds and hundreds of MB each), and
    the result of a large schema is 70 MB to hand over; only xgrammar's can be handed over at all. A
    bound on a schema's size: 450 KB take 24 s, 60 KB with nested counts take longer, and a larger
    one with a few names takes none.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sipipe.engine.setup.derived import settings_of
from sipipe.errors import one_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

INVALID = "Invalid structured outputs: "
"""Beginning of a sentence to the client; vLLM 0.33 has the same words, and answers with status 400."""
LEAST = 2
"""Grammars that are compiled at a time, also on one core: a long one must not hold up the others."""
LOWEST_PRIORITY = 19
"""Nice value of a thread whose result nobody waits for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Compilation:
    """One request's grammar, from its arrival until its future is resolved or its thread has ended."""

    create: Callable[[Request], Any]
    """vLLM's ``StructuredOutputManager._create_grammar``."""
    request: Request
    since: float
    """The time at which it began to wait or, once it runs, to run, in seconds of the clock."""
    future: Future[Any] = field(default_factory=Future)
    thread: int | None = None
    """The native id of the thread that compiles it; None before."""


class Compilations:
    """Compiles grammars in threads of their own; has what vLLM uses of a ThreadPoolExecutor.

    Args:
        seconds: Time that a grammar may take, and may wait for others before.
        check: Raises ValueError where a compiled grammar is of no use, with the reason.
        most: Grammars at a time.
        now: The clock of the bounds, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        *,
        check: Callable[[Any], None],
        most: int = LEAST,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._check = check
        self._most = most
        self._now = now
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it
        self._waiting: deque[Compilation] = deque()
        self._running: set[Compilation] = set()
        self._abandoned: set[Compilation] = set()
        """Compilations that run on though nobody waits for them any more."""
        self._closed = False

    def submit(self, create: Callable[[Request], Any], request: Request) -> Future[Any]:
        """The future of ``create(request)``, which is called as soon as there is room."""
        compilation = Compilation(create=create, request=request, since=self._now())
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine ends")
            self._waiting.append(compilation)
        self.sweep()
        return compilation.future

    def sweep(self) -> None:
        """Give up compilations that are late, and those that nobody waits for; start others, as many as
        there is room for."""
        if not self._waiting and not self._running:
            return
        with self._lock:
            now = self._now()
            for compilation in [*self._running, *self._waiting]:
                if compilation.request.is_finished():
                    self._give_up(compilation, "its request has ended")
                elif now - compilation.since > self._seconds:
                    self._give_up(compilation, self._late(compilation))
            self._start(now)

    def shutdown(self, **_: bool) -> None:
        """Give up everything. Running threads are not waited for, whatever vLLM's ``wait`` says."""
        with self._lock:
            self._closed = True
            for compilation in [*self._running, *self._waiting]:
                self._give_up(compilation, "the engine ends")

    def _start(self, now: float) -> None:
        """Start waiting compilations while there is room. Call with the lock held."""
        while (
            self._waiting
            and len(self._running) < self._most
            and len(self._running) + len(self._abandoned) < 2 * self._most
        ):
            compilation = self._waiting.popleft()
            compilation.since = now
            self._running.add(compilation)
            thread = threading.Thread(
                target=self._compile,
                args=(compilation,),
                name="SiPipeGrammar",
                daemon=True,  # the engine's end does not wait for it
            )
            try:
                thread.start()
            except (
                RuntimeError
            ) as error:  # a container's limit of threads: that request alone fails
                self._running.discard(compilation)
                with suppress(InvalidStateError):
                    compilation.future.set_exception(ValueError(one_line(error)))

    def _compile(self, compilation: Compilation) -> None:
        """Compile, resolve the future, and start the next. Runs in a thread of its own."""
        compilation.thread = threading.get_native_id()
        grammar: Any = None
        problem: BaseException | None = None
        try:
            grammar = compilation.create(compilation.request)
            self._check(grammar)
        except BaseException as error:
            problem = error
        with self._lock:
            self._running.discard(compilation)
            self._abandoned.discard(compilation)
            with suppress(InvalidStateError):
                if problem is None:
                    compilation.future.set_result(grammar)
                else:
                    compilation.future.set_exception(ValueError(one_line(problem)))
            if not self._closed:
                self._start(self._now())

    def _give_up(self, compilation: Compilation, reason: str) -> None:
        """Fail the future with ``reason``, and let a running thread go on for nobody. Call with the
        lock held."""
        if compilation in self._running:
            self._running.discard(compilation)
            self._abandoned.add(compilation)
            if compilation.thread is not None:
                with suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, compilation.thread, LOWEST_PRIORITY)
        else:
            self._waiting.remove(compilation)
        with suppress(InvalidStateError):
            compilation.future.set_exception(ValueError(reason))

    def _late(self, compilation: Compilation) -> str:
        """The sentence for the client of a compilation that is late."""
        if compilation not in self._running:
            return (
                f"the grammar has waited for {self._seconds:g} s while those of other requests are "
                "compiled; try again later"
            )
        return (
            f"the grammar did not compile within {self._seconds:g} s; make it smaller, or its "
            'repetition counts (minItems, maxLength, {n}), or raise "grammar_timeout" in the sipipe '
            "config"
        )


def allows_nothing(manager: StructuredOutputManager, grammar: Any) -> bool:
    """Say if a compiled grammar of ``manager``'s allows no next token, and has not ended either."""
    if grammar.is_terminated():
        return False
    assert manager.backend is not None, "a grammar was compiled"
    bitmask = manager.backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(bitmask, 0)
    return not bitmask.any()


def check_grammar(manager: StructuredOutputManager, grammar: Any) -> None:
    """Raise ValueError if a compiled grammar allows no first token: one that refers only to itself."""
    if allows_nothing(manager, grammar):
        raise ValueError(
            "the grammar allows no token at all: it refers only to itself, or contradicts itself"
        )


def compile_beside(
    manager: StructuredOutputManager, vllm_config: VllmConfig
) -> Compilations | None:
    """Have ``manager`` compile its grammars by :class:`Compilations`, which are returned; None where it
    has no tokenizer, and so no grammars."""
    pool = getattr(manager, "executor", None)
    if pool is None:
        return None
    pool.shutdown(wait=False)
    compilations = Compilations(
        settings_of(vllm_config).grammar_timeout,
        check=lambda grammar: check_grammar(manager, grammar),
        most=max(LEAST, (multiprocessing.cpu_count() + 1) // 2),
    )
    manager.executor = compilations
    return compilations
