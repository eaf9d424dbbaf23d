"""Streaming sessions, and ids that are used again: two places where vLLM's scheduler trusts its client.

A session (vLLM's ``StreamingInput``) is one request that gets more prompt turn by turn. vLLM's front
end checks the length of each turn alone, and its scheduler adds them up unchecked: a session longer
than ``max_model_len`` would end the engine at an assertion of a worker, and one exactly as long would
never end. Here a turn that leaves no room for a token ends with finish reason "length" and without a
token. The session stays as it was before it, and may go on with a shorter turn.

An id that is aborted and given again at once, as a session's is after a pause with abort, names
another request while the tokens of the first are still out. vLLM would hand them to the second, and
end the engine at ``num_output_placeholders >= 0``. Here what was scheduled for the first is nobody's.

Who runs here: the engine's thread only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.iteration.iterations import Iterations


class SessionScheduler:
    """Mixin in front of any scheduler of vLLM's."""

    iterations: Iterations

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overlong: list[Request] = []
        """Sessions with a turn that does not fit, one entry a turn; each gets its answer."""
        self._replaced: defaultdict[int, set[str]] = defaultdict(set)
        """Ids that another request has now, by identity of the scheduling output in which the first
        one is. That output lives until its result is taken in, so its identity is its own."""

    def add_request(self, request: Request) -> None:
        """Add a request, or the next turn of a session."""
        session = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        if session is None:
            for output in self.iterations.outputs_with(request.request_id):
                self._replaced[id(output)].add(request.request_id)
        elif (
            session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            and request.resumable
            and not self._fits(session.num_computed_tokens, request.prompt_token_ids)
        ):
            self._overlong.append(session)
            return
        super().add_request(request)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """Count a turn that waits for its answer: an engine that is idle otherwise gives it now."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return count + len(self._overlong)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a result in, but for requests whose id is another's now; answer turns too long."""
        replaced = self._replaced.pop(id(scheduler_output), ())
        requests = self.requests  # type: ignore[attr-defined]
        # vLLM leaves out what is scheduled for an id that it does not know.
        hidden = {name: requests.pop(name) for name in replaced if name in requests}
        result: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        requests.update(hidden)
        self._answer_overlong(result)
        return result

    def _handle_stopped_request(self, request: Request) -> bool:
        """Leave turns out that do not fit, before vLLM takes the next one."""
        queue = request.streaming_queue
        frontier = request.num_computed_tokens - request.num_output_placeholders
        # bound: the turns that wait
        while request.resumable and queue and queue[0] is not None:
            if self._fits(frontier, queue[0].prompt_token_ids):
                break
            queue.popleft()
            self._overlong.append(request)
        ended: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        return ended

    def _fits(self, computed: int, prompt: Sequence[int] | None) -> bool:
        """Say if a session of ``computed`` tokens has room for a turn and one token behind it."""
        return computed + len(prompt or ()) < self.max_model_len  # type: ignore[attr-defined,no-any-return]

    def _answer_overlong(self, result: dict[int, EngineCoreOutputs]) -> None:
        overlong = self._overlong
        self._overlong = []
        for session in overlong:
            # A session that ends with such a turn has left by now, but its client waits for the answer.
            if session.status == RequestStatus.FINISHED_ABORTED:
                continue
            answer = EngineCoreOutput(
                request_id=session.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.LENGTH,
            )
            outputs = result.setdefault(session.client_index, EngineCoreOutputs())
            outputs.outputs.append(answer)
