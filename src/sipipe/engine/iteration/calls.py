"""Calls of the workers: published on BIC-I, in order with the iterations; answered through pipes.

Who runs here
    Any thread calls, once iterations run with none planned (``Dispatcher.publish_all``), whose tokens
    workers would wait for; the events thread hands replies in. The table is under ``_lock``, which
    is never held while something is published.
Guarantees
    A future is resolved once: with the results, with the first error of a rank, or with what
    stopped the engine. A call whose arguments or result cannot be pickled fails alone.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import cloudpickle

from sipipe.engine.iteration.bus import Bus
from sipipe.errors import StallError
from sipipe.messages.calls import Request
from sipipe.messages.header import Kind
from sipipe.messages.pickles import out_of_band
from sipipe.messages.replies import Reply

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    method: str
    only: int | None
    """The one rank whose result is wanted; None: those of all."""
    waiting: set[int]
    workers: Sequence[str]
    began: float
    """Begin in seconds of the calls' clock; the stall bound counts from here."""
    future: Future[Any] = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)
    may_be_long: ClassVar[bool] = True
    """Only its caller knows how long it takes."""

    def __str__(self) -> str:
        late = ", ".join(self.workers[rank] for rank in sorted(self.waiting))
        return f"a call of {self.method} waits for {late}"


def result_of(future: Future[T], late: Callable[[], object], seconds: float) -> T:
    """Wait for the result of a call while the engine starts.

    Raises StallError: it takes more than ``seconds``; the message names what is ``late``. Also what
    fails the call, which may be a StallError of another host.
    """
    # wait: `start_timeout`; the answers, or what fails the engine
    if not wait([future], seconds).done:
        raise StallError(
            f"not ready in time: {late()} for {seconds:g} s. Raise "
            '"start_timeout" in the sipipe config if it may take so long'
        )
    return future.result()  # wait: none, it is done; nobody


@dataclass
class Calls:
    _bus: Bus
    _workers: Sequence[str]
    """Their names, by rank."""
    _now: Callable[[], float] = time.monotonic
    """The clock of the stall bound."""
    _calls: dict[int, _Call] = field(default_factory=dict)
    _next: int = 0
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it

    def call(
        self,
        method: str | Callable[..., Any] | Request[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        only: int | None = None,
    ) -> Future[Any]:
        """Publish one call; its future has the results by rank, or that of rank ``only``."""
        title = getattr(method, "__name__", "a function") if callable(method) else str(method)
        # Also of functions that this process was given by value.
        parts = out_of_band((method, args, kwargs or {}, only), cloudpickle.dumps)
        ranks = {only} if only is not None else set(range(len(self._workers)))
        call = _Call(title, only, ranks, self._workers, self._now())
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"SiPipe's executor has failed: {self._failure}")
            number = self._next
            self._next = self._next + 1
            self._calls[number] = call
        self._bus.publish(Kind.CONTROL, number, [b"", *parts])
        return call.future

    def ask(self, request: Request[T], seconds: float) -> list[T]:
        """The answers of all ranks to a request while the engine starts. StallError: not within
        ``seconds``. RuntimeError: what one of them raised."""
        answered: Future[list[T]] = self.call(request)
        return result_of(answered, self.oldest, seconds)

    def reply(self, worker: str, reply: Reply) -> None:
        """Take one worker's answer in."""
        rank = self._workers.index(worker)
        error = reply.error
        value: Any = None
        if error is None:
            try:
                value = pickle.loads(reply.value)  # from our child, through a pipe of its own
            except Exception as problem:
                error = f"its result cannot be read here: {problem}"
        with self._lock:
            call = self._calls.get(reply.call)
            if call is None or rank not in call.waiting:
                return
            if error is None:
                call.results[rank] = value
                call.waiting.discard(rank)
                if call.waiting:
                    return
            del self._calls[reply.call]
        with suppress(InvalidStateError):
            if error is not None:
                text = f"Worker {worker} failed in {call.method} with error '{error}', "
                text += "please check the stack trace above for the root cause"
                call.future.set_exception(RuntimeError(text))
            elif call.only is not None:
                call.future.set_result(call.results[call.only])
            else:
                call.future.set_result([call.results[r] for r in sorted(call.results)])

    def oldest(self) -> _Call | None:
        """The first of those that are out."""
        with self._lock:
            return next(iter(self._calls.values()), None)

    def fail(self, error: BaseException) -> None:
        """Resolve every call that is out with ``error``, and refuse new ones."""
        with self._lock:
            self._failure = error
            calls = self._calls
            self._calls = {}
        for call in calls.values():
            with suppress(InvalidStateError):
                call.future.set_exception(RuntimeError(f"call to {call.method} failed: {error}"))
