"""KV cache blocks and rows of the workers that a streaming session holds between its turns.

vLLM leaves a session its blocks until its client comes back or ends it, and takes them from nobody.
So sessions whose clients are silent keep all others waiting, two sessions that each hold what the
other needs wait for ever, and the prefix cache cannot be reset. Its scheduler counts a row of the
model runner for a session without a turn, but none for one whose turn waits.

Here such a session is preempted like any running request: it keeps its tokens and loses its blocks
and its row. Its next turn computes them anew, as far as the prefix cache does not have them.

Guarantees
    A request that can be scheduled with no session in its way is scheduled: sessions without a turn
    go first, the one whose client has been silent for longest before others; sessions whose turn
    waits go only where nothing runs, for what runs gives back its blocks by itself. At most
    ``max_num_seqs`` requests have a row in the workers.
Relies on
    vLLM lists a request without computed blocks as new, whatever it was before, and names those that
    lost their blocks in ``preempted_req_ids`` of the scheduling output that is made next.
Rejected
    Preempting at the end of each turn: a session's history would be computed again in each turn
    where there is no prefix cache. Moving the session to vLLM's other queue: ``schedule`` has taken
    it out of its queue while it looks for room, and puts it where it belongs at its next look.

Who runs here: the engine's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

BETWEEN_TURNS = (RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.WAITING)
"""States of a session that does not run: without a turn, and with one that waits."""


PLENTY = 0.2
"""Free share of the KV cache for which nobody looks what sessions hold."""


class SessionMemory:
    """Mixin in front of any scheduler of vLLM's."""

    num_waiting_for_streaming_input: int  # these are vLLM's, which no type checker sees
    requests: dict[str, Request]
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._allocate: Callable[..., KVCacheBlocks | None] | None = None
        """vLLM's way to blocks, from the first session on; before that nothing stands in its place,
        where every row of every microbatch passes."""

    def add_request(self, request: Request) -> None:
        """Add a request; from the first session on, look for room among sessions too."""
        if request.resumable and self._allocate is None:
            manager = self.kv_cache_manager  # type: ignore[attr-defined]
            self._allocate = manager.allocate_slots
            manager.allocate_slots = self._allocate_making_room
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Make a scheduling output. Sessions without a turn take nobody's place in it: who needs their
        rows gets them, at :meth:`_allocate_making_room`."""
        if self._allocate is None:
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
            return output
        counted = self.num_waiting_for_streaming_input
        self.num_waiting_for_streaming_input = 0
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.num_waiting_for_streaming_input = counted
        return output

    def get_num_unfinished_requests(self) -> int:
        """Count requests as vLLM does. While new ones are held back it counts those that wait with
        blocks, less all sessions without a turn: those without blocks are put back here."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        if self._allocate is None or self.pause_state != PauseState.PAUSED_NEW:  # type: ignore[attr-defined]
            return count
        without_turn = RequestStatus.WAITING_FOR_STREAMING_REQ
        return count + sum(request.status == without_turn for request in self.waiting)  # type: ignore[attr-defined]

    def kv_free(self) -> float:
        """Share of the KV cache that a request can have, 0 to 1: what is free, and what sessions without a
        turn hold. They give it up for whoever needs it, so it holds nobody back."""
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        free: float = 1.0 - manager.usage
        if self._allocate is None or free >= PLENTY:
            return free
        without_turn = RequestStatus.WAITING_FOR_STREAMING_REQ
        held = sum(
            len(blocks)
            for session in self._holding()
            if session.status == without_turn
            for blocks in manager.get_blocks(session.request_id).blocks
        )
        share: float = free + held / manager.block_pool.num_gpu_blocks
        return min(1.0, share)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the prefix cache; with ``reset_running_requests`` sessions lose their blocks too."""
        if reset_running_requests:
            for session in self._holding():
                self._take_blocks_of(session)
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)  # type: ignore[misc]
        return done

    def _allocate_making_room(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Stand in the place of vLLM's ``allocate_slots``: a session goes before a request has to wait."""
        assert self._allocate is not None
        if request.status != RequestStatus.RUNNING:
            self._make_row(request)
        blocks = self._allocate(request, *args, **kwargs)
        while blocks is None:  # bound: the sessions that hold blocks
            session = self._in_the_way(request)
            if session is None:
                break
            self._take_blocks_of(session)
            blocks = self._allocate(request, *args, **kwargs)
        return blocks

    def _make_row(self, request: Request) -> None:
        """Have a row of the workers free for a request that begins to run."""
        holding = self._holding()
        if request in holding:  # it has its row
            return
        if len(self.running) + len(holding) >= self.max_num_running_reqs:  # type: ignore[attr-defined]
            self._take_blocks_of(_first_to_go(holding))

    def _in_the_way(self, request: Request) -> Request | None:
        """The session that goes next so that ``request`` has room; None: none does."""
        holding = [
            session
            for session in self._holding()
            if session is not request and self._request_blocks_can_be_freed(session)  # type: ignore[attr-defined]
        ]
        if self.running:
            without_turn = RequestStatus.WAITING_FOR_STREAMING_REQ
            holding = [session for session in holding if session.status == without_turn]
        return _first_to_go(holding) if holding else None

    def _holding(self) -> list[Request]:
        """Sessions that do not run and hold blocks."""
        if self._allocate is None:
            return []
        return [
            request
            for request in self.requests.values()
            if request.streaming_queue is not None
            and request.status in BETWEEN_TURNS
            and request.num_computed_tokens > 0
        ]

    def _take_blocks_of(self, session: Request) -> None:
        """Preempt a session that does not run, by vLLM's own way for those that do."""
        status = session.status
        session.status = RequestStatus.RUNNING
        self._preempt_request(session, time.monotonic(), drop_stale_output=True)  # type: ignore[attr-defined]
        session.status = status
        self.waiting.remove_requests([session])  # type: ignore[attr-defined]


def _first_to_go(sessions: list[Request]) -> Request:
    """Pick one without a turn, whose client has been silent for longest; else the youngest turn."""
    without_turn = [
        session for session in sessions if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    ]
    if without_turn:
        return min(without_turn, key=lambda session: session.arrival_time)
    return max(sessions, key=lambda session: session.arrival_time)
