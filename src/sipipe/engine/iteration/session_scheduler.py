"""Streaming sessions, and ids that are used again: two places where vLLM's scheduler trusts its client.

A session (vLLM's ``StreamingInput``) is one request that gets more prompt turn by turn. vLLM's front
end checks the length of each turn alone, and its scheduler adds them up unchecked: a session longer
than ``max_model_len`` would end the engine at an assertion of a worker, and one exactly as long would
never end. Here a turn that leaves no room for a token ends with finish reason "length" and without a
token. The session stays as it was before it, and may go on with a shorter turn.

A turn may end while its session is preempted, by the token that was still to come. vLLM then takes
the session out of its queues, so that it never runs again, and takes the number of its computed
tokens, none, for what it has said so far. Here it is put back, with all but its last token.

An id that is aborted and given again at once, as a session's is after a pause with abort, names
another request while the tokens of the first are still out. vLLM would hand them to the second, and
end the engine at ``num_output_placeholders >= 0``. Here what was scheduled for the first is nobody's.

Who runs here: the engine's thread only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from sipipe.engine.iteration.admission import REFUSED, bound_counts, is_duplicate, refusal
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.session_memory import SessionMemory

logger = init_logger(f"vllm.{__name__}")


class SessionScheduler(SessionMemory):
    """Mixin in front of any scheduler of vLLM's."""

    iterations: Iterations
    vllm_config: VllmConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overlong: list[Request] = []
        """Sessions with a turn that does not fit, one entry a turn; each gets its answer."""
        self._unserved: list[tuple[Request, str]] = []
        """Requests that are not served, and why; each gets its answer."""
        self._stopped_preempted: list[Request] = []
        """Sessions whose turn has ended in this update while they were preempted."""
        self._replaced: defaultdict[int, set[str]] = defaultdict(set)
        """Ids that another request has now, by identity of the scheduling output in which the first
        one is. That output lives until its result is taken in, so its identity is its own."""

    def add_request(self, request: Request) -> None:
        """Add a request, or the next turn of a session; or keep why it is refused for its client."""
        known = self.requests.get(request.request_id)
        if is_duplicate(request, known):
            self._refuse_duplicate(request, known)
            return
        if reason := self._refusal(request, known):
            self._refuse(request, reason)
            return
        bound_counts(request, self.vllm_config.model_config.max_model_len)
        if known is None:
            for output in self.iterations.outputs_with(request.request_id):
                self._replaced[id(output)].add(request.request_id)
        elif (
            known.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            and request.resumable
            and not self._fits(known, request.num_prompt_tokens)
        ):
            self._overlong.append(known)
            return
        super().add_request(request)

    def _refusal(self, request: Request, known: Request | None) -> str:
        """Why ``request`` cannot be served; empty where it can."""
        return refusal(request, known, self.vllm_config)

    def get_num_unfinished_requests(self) -> int:
        """Count what waits for an answer too: an engine that is idle otherwise gives it now."""
        return super().get_num_unfinished_requests() + len(self._overlong) + len(self._unserved)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a result in, but for requests whose id is another's now; answer who waits for it."""
        replaced = self._replaced.pop(id(scheduler_output), ())
        requests = self.requests
        # vLLM leaves out what is scheduled for an id that it does not know.
        hidden = {name: requests.pop(name) for name in replaced if name in requests}
        result: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        requests.update(hidden)
        stopped = self._stopped_preempted
        self._stopped_preempted = []
        for session in stopped:
            # vLLM 0.33 has put it back by itself; twice in the queues it would run twice.
            if not session.is_finished() and not self._is_queued(session):
                self._enqueue_waiting_request(session)  # type: ignore[attr-defined]
        self._answer_overlong(result)
        self._answer_unserved(result)
        return result

    def _is_queued(self, request: Request) -> bool:
        """Say if a request is in one of the queues of those that wait."""
        queues = (self.waiting, self.kv_holding_waiting)  # type: ignore[attr-defined]
        return any(waiting is request for queue in queues for waiting in queue)

    def _handle_stopped_request(self, request: Request) -> bool:
        """Leave turns out that do not fit, before vLLM takes the next one."""
        queue = request.streaming_queue
        # bound: the turns that wait
        while request.resumable and queue and queue[0] is not None:
            if self._fits(request, len(queue[0].prompt_token_ids or ())):
                break
            queue.popleft()
            self._overlong.append(request)
        preempted = request.num_computed_tokens == 0
        if not preempted:
            # A draft that was right is computed already, a token that was drawn is not. Whichever a
            # turn's last token was, the session goes on without it.
            most = _history_length(request) + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, most)
        ended: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if preempted and not ended:
            self._stopped_preempted.append(request)
        return ended

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Begin a turn. What vLLM keeps of the turns before is what is computed of them, which is
        nothing where the session has lost its blocks; here it is all but the last token."""
        computed = session.num_computed_tokens
        session.num_computed_tokens = _history_length(session)
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        session.num_computed_tokens = computed

    def _fits(self, session: Request, prompt: int) -> bool:
        """Say if a session has room for a turn of ``prompt`` tokens and one token behind it."""
        return _history_length(session) + prompt < self.max_model_len  # type: ignore[attr-defined,no-any-return]

    def _refuse(self, request: Request, reason: str) -> None:
        """Keep an answer for a request that is not served; a session that it belongs to ends."""
        logger.error("request %s is refused: %s", request.request_id, reason)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
        request.status = RequestStatus.FINISHED_ERROR  # its grammar is not compiled any further
        self._unserved.append((request, REFUSED + reason))

    def _refuse_duplicate(self, request: Request, known: Request | None) -> None:
        """Leave out a request whose id is in use; the one that has it goes on. A client of another
        front end is told. Within one the answer would be the first one's: it checks ids itself."""
        reason = f"request id {request.request_id} is in use: give each request an id of its own"
        logger.error("a request is refused: %s", reason)
        if known is not None and known.client_index != request.client_index:
            self._unserved.append((request, REFUSED + reason))

    def _answer_overlong(self, result: dict[int, EngineCoreOutputs]) -> None:
        overlong = self._overlong
        self._overlong = []
        for session in overlong:
            # A session that ends with such a turn has left by now, but its client waits for the answer.
            if session.status == RequestStatus.FINISHED_ABORTED:
                continue
            _answer(session, FinishReason.LENGTH, None, result)

    def _answer_unserved(self, result: dict[int, EngineCoreOutputs]) -> None:
        unserved = self._unserved
        self._unserved = []
        for request, reason in unserved:
            _answer(request, FinishReason.ERROR, reason, result)


def _history_length(session: Request) -> int:
    """Tokens with which a session goes on behind a turn: all but the last, which is not computed."""
    return int(session.num_tokens) - 1


def _answer(
    request: Request,
    reason: FinishReason,
    explanation: str | None,
    result: dict[int, EngineCoreOutputs],
) -> None:
    answer = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=reason,
        stop_reason=explanation,
    )
    outputs = result.setdefault(request.client_index, EngineCoreOutputs())
    outputs.outputs.append(answer)
