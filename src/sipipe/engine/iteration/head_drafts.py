"""Drafts of a head on the last stage: asked for when tokens are in, taken at the slot's next turn.

Who runs here
    Whoever brings tokens asks, before anything that waits for them is published. The events thread, or
    that of another host, brings drafts. The engine thread takes them, when clients have the tokens.
Guarantees
    A request for drafts is sent before any iteration is published whose requests may have the blocks of
    its own: both are done under ``_lock``, and the iteration says how many requests came before it. How
    many drafts an iteration asks for is decided when it is scheduled. So it is known of those in flight
    whether a request may come, and none is planned as long as one may (:meth:`.Iterations.plan`).
    Nobody waits longer than :data:`SECONDS`: then requests have no drafts this time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.iteration import Iteration
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.messages.drafts import LEFT_OUT, URGENT, Drafted, DraftRequest, encode_request
from sipipe.messages.step import int32_bytes, int32_view

RATE = 0.05
"""Weight of the last request in the seconds that a head takes."""
SECONDS = 5.0
"""Longest wait for drafts: that of a pass over a long prompt that the last stage has begun. In a longer
one requests are better off without drafts than the engine is without a scheduler."""


@dataclass(slots=True)
class _Asked:
    request_ids: Sequence[str]
    """Requests that got a token, in the order of the scheduling output."""
    answer: dict[str, list[int]] | None = None
    """Drafts by request; None: they have not come."""


class HeadDrafts:
    """Requests for drafts, and drafts that have come."""

    def __init__(self, tracker: RequestTracker, send: Callable[[bytes], None]) -> None:
        """``send`` hands a message to the last stage's workers."""
        self._tracker = tracker
        self._send = send
        self.pass_seconds = 0.0
        """Seconds that the head takes for one draft of each request of a microbatch, lately."""
        # wait: held while a request is sent (10 s, `PIPE_SECONDS`); nobody waits under it but on its
        # condition, which lets it go
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        """Notified when drafts have come, or the engine has failed."""
        self._number = 0
        """Requests that were sent."""
        self._asked: dict[int, _Asked] = {}
        """Iterations whose drafts were asked for and not taken, by number."""
        self._failed = False
        self._asking = BestEffort("asking a head for drafts", bounded=False)
        self._learning = BestEffort("the seconds that a head takes", bounded=False)
        self._reading = BestEffort("reading the drafts of a head", bounded=False)

    def ask(self, iteration: Iteration, tokens: Iterable[tuple[str, list[int]]]) -> None:
        """The tokens of ``iteration``, by request, are known to who follows requests."""
        if iteration.work.sampled and iteration.scheduled.asks:
            self._asking(None, self._ask, iteration, dict(tokens))

    def _ask(self, iteration: Iteration, tokens: dict[str, list[int]]) -> None:
        number = iteration.number
        request_ids = list(dict.fromkeys(iteration.work.sampled))
        with self._lock:
            alive = self._tracker.with_blocks(number, request_ids)
            if not alive:
                return
            drawn = [tokens[name] if name in alive else [] for name in request_ids]
            request = DraftRequest(
                number=self._number + 1,
                iteration=number,
                steps=iteration.scheduled.asks,
                drawn=int32_bytes([len(of_request) or LEFT_OUT for of_request in drawn]),
                last=int32_bytes([of_request[-1] if of_request else 0 for of_request in drawn]),
            )
            self._send(URGENT + encode_request(request))
            self._number += 1
            self._asked[number] = _Asked(request_ids)

    def sent(self) -> int:
        """Return the number of requests that were sent; call it when what frees their blocks has been followed."""
        with self._lock:
            return self._number

    def came(self, drafted: Drafted) -> None:
        """The last stage has proposed drafts."""
        with self._lock:
            self._learning(None, self._learn, drafted)
            request = self._asked.get(drafted.iteration)
            if request is None:
                return  # the scheduler has gone on without
            # None are there where the head has failed.
            request.answer = self._reading({}, _by_request, request.request_ids, drafted)
            self._came.notify_all()

    def _learn(self, drafted: Drafted) -> None:
        if drafted.seconds:
            seconds = drafted.seconds / drafted.steps
            rate = RATE if self.pass_seconds else 1.0
            self.pass_seconds += rate * (seconds - self.pass_seconds)

    def take(self, iterations: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """Drafts by request of each of ``iterations``, of those that were asked for; waits for them.
        An iteration whose drafts are late has none, whenever they come."""
        with self._lock:
            awaited = [number for number in iterations if number in self._asked]
            # wait: 5 s (`SECONDS`); the last stage, the engine's failure
            self._came.wait_for(
                lambda: (
                    self._failed
                    or all(self._asked[number].answer is not None for number in awaited)
                ),
                SECONDS,
            )
            return {number: self._asked.pop(number).answer or {} for number in awaited}

    def fail(self, error: BaseException) -> None:  # noqa: ARG002
        """The engine ends: nobody waits any more."""
        with self._lock:
            self._failed = True
            self._came.notify_all()


def _by_request(request_ids: Sequence[str], drafted: Drafted) -> dict[str, list[int]]:
    """Drafts of each request, in the order that they were asked for."""
    drafts = int32_view(drafted.drafts).reshape(-1, drafted.steps)
    return dict(zip(request_ids, drafts.tolist(), strict=False))
