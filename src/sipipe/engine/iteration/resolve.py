"""Results in: tokens from BIC-O and the last stage's reports become the futures' results.

Who runs here
    The gather thread sleeps on BIC-O; the events thread reports.
Guarantees
    The tracker knows an iteration's tokens before its future is resolved, and before anything is
    published that waits for them: ``publish_due`` does that.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.engine.iteration.iteration import Iteration
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.iteration.telemetry import Telemetry
from sipipe.engine.iteration.work import Work
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.gather import GatherReceiver
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.messages.step import decode_sampled, int32_view
from sipipe.observe.phases import Phase

NO_ANSWER = (
    "no token came back for it, and no reason: this is a fault of SiPipe's, please report it"
)
"""Why a request fails whose token was drawn by nobody."""


class Resolver:
    """Resolves iterations by the tokens and reports that come in."""

    def __init__(
        self,
        *,
        iterations: Iterations,
        tracker: RequestTracker,
        gather: GatherReceiver,
        telemetry: Telemetry,
        publish_due: Callable[[], None],
        fail: Callable[[BaseException], None],
        head_drafts: HeadDrafts | None = None,
    ) -> None:
        """Start the gather thread.

        ``publish_due`` publishes what waited for an iteration. ``fail`` takes the error that stops
        this thread. ``head_drafts`` takes the tokens that a head on the last stage is to draft
        behind, where there is a head."""
        self._iterations = iterations
        self._tracker = tracker
        self._gather = gather
        self._telemetry = telemetry
        self._publish_due = publish_due
        self._fail = fail
        self.head_drafts = head_drafts
        self.aggregator: KVOutputAggregator | None = None
        """vLLM's, where there is a KV connector. Two threads use it, one at a time."""
        self._joining = threading.Lock()  # wait: held for moments; nobody waits under it
        """Held while what two threads may do at once is joined, or counted."""
        self.thread = threading.Thread(target=self._collect, name="SiPipeGather", daemon=True)
        self.thread.start()

    def report(self, report: IterationReport) -> None:
        """The last stage has run an iteration that waits for its word."""
        self._resolve(self._iterations.deliver(report.iteration, report=report))

    def moved(self, report: KVReport) -> None:
        """A worker's KV connector has done its part of an iteration."""
        self._resolve(self._iterations.deliver(report.iteration, moved=report))

    def close(self) -> None:
        """Close BIC-O, and wait for the thread on it."""
        self._gather.close()
        if self.thread is not threading.current_thread():
            self.thread.join(5.0)

    def _collect(self) -> None:
        try:
            while True:
                number, answers = self._gather.collect()
                frames = collections.deque(chain.from_iterable(answers.values()))
                answers.clear()
                tokens = []
                while frames:  # each goes as it is taken in
                    tokens.append(decode_sampled(frames.popleft()))
                self._resolve(self._iterations.deliver(number, tokens=tokens))
        except ChannelClosed:
            return
        except Exception as error:
            self._fail(error)

    def _resolve(self, iteration: Iteration | None) -> None:
        if iteration is None:
            return
        output = build_output(iteration)
        if iteration.begun.movers:
            output = self._join(output, iteration)
        drawn = sum(map(len, output.sampled_token_ids))
        # A pooling model has no tokens.
        by_request = zip(output.req_ids, output.sampled_token_ids, strict=False)
        # What fails has no token; where it is scheduled once more already, some token must be there.
        fillers = ((request_id, [0]) for request_id in iteration.outcome.errors)
        self._tracker.record(iteration.number, chain(by_request, fillers))
        if self.head_drafts is not None:
            by_request = zip(output.req_ids, output.sampled_token_ids, strict=True)
            self.head_drafts.ask(iteration, by_request)
        self._iterations.leave(iteration)
        try:
            self._publish_due()
        except Exception as error:
            self._fail(error)
        with self._joining:
            now = time.monotonic_ns()
            self._telemetry.record(
                Phase.GATHER, iteration, iteration.on_bus.published_ns, now, tokens=drawn
            )
        with suppress(InvalidStateError):
            iteration.future.set_result(output)

    def _join(self, output: ModelRunnerOutput, iteration: Iteration) -> ModelRunnerOutput:
        """``output`` with what all workers' KV connectors say."""
        assert self.aggregator is not None, "vLLM makes it before the first iteration"
        moved = [iteration.answers.moved[rank] for rank in range(iteration.begun.movers)]
        without_tokens = [ModelRunnerOutput.with_kv_conn_output_only(one) for one in moved[:-1]]
        output.kv_connector_output = moved[-1]
        with self._joining:
            joined = self.aggregator.aggregate(
                [*without_tokens, output], output_rank=len(without_tokens)
            )
        assert joined is not None
        return joined


class SampledLogprobs:
    """Log-probabilities by request, each as wide as it was asked for. Stands in for vLLM's
    ``LogprobsLists`` of a whole batch, of which the scheduler uses ``slice_request`` only; nothing
    is padded to the widest request."""

    def __init__(self, rows: dict[int, list[LogprobsLists]]) -> None:
        self._rows = rows

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists | None:
        """Those of one request; None while it is in the middle of its prompt."""
        rows = self._rows[req_idx][:num_positions] if num_positions else []
        if len(rows) < 2:
            return rows[0] if rows else None
        ids, values, ranks, _ = zip(*rows, strict=True)
        return LogprobsLists(
            np.concatenate(ids), np.concatenate(values), np.concatenate(ranks), None
        )


def build_output(iteration: Iteration) -> ModelRunnerOutput:
    """The output of a complete iteration, and with it what fails: ``outcome.errors``. A request
    whose logits have no distribution, or which no sampler can draw for, gets no token."""
    work = iteration.work
    report = iteration.answers.report
    outcome = iteration.outcome
    if report is not None and report.output is not None:
        output = report.output
        outcome.errors |= _unanswered(
            work, output.req_id_to_index, output.sampled_token_ids, outcome.errors
        )
        outcome.drafts = {
            request_id: report.drafts[request_id]
            for request_id in work.on_device
            if report.drafts.get(request_id) and request_id not in outcome.errors
        }
        outcome.drawn = _counts(output.req_ids, output.sampled_token_ids)
        return output
    index = {request_id: i for i, request_id in enumerate(work.request_ids)}
    tokens: list[list[int]] = [[] for _ in work.request_ids]
    logprobs: dict[int, list[LogprobsLists]] = {}
    for part in iteration.answers.tokens or ():
        rows = int32_view(part.rows).tolist()
        for row, token in zip(rows, int32_view(part.tokens).tolist(), strict=True):
            if token >= 0:
                tokens[index[work.sampled[row]]].append(token)
        for lp in part.logprobs:
            token_ids = int32_view(lp.token_ids)
            values = np.frombuffer(lp.values, dtype="<f4")
            row_logprobs = LogprobsLists(
                token_ids[None, :], values[None, :], np.asarray([lp.rank]), None
            )
            logprobs.setdefault(index[work.sampled[lp.row]], []).append(row_logprobs)
        for row, reason in part.errors:
            outcome.errors[work.sampled[row]] = reason
        for row, drafts in part.drafts:
            outcome.drafts[work.sampled[row]] = int32_view(drafts).tolist()
    for request_id, token in zip(work.on_device, report.tokens if report else (), strict=True):
        tokens[index[request_id]].append(token)

    # A row behind drafts may have no token where a single step would not have come to it: the tokens
    # before may end the request. If they do not, its next turn draws that row again, and fails.
    outcome.tainted = bool(outcome.errors)
    outcome.errors = {of: why for of, why in outcome.errors.items() if not tokens[index[of]]}
    outcome.errors |= _unanswered(work, index, tokens, outcome.errors)
    outcome.drawn = _counts(work.request_ids, tokens)

    def of_good(scores: Any) -> dict[str, Any]:
        """Scores by request; the scheduler takes none of one that fails."""
        return {of: value for of, value in dict(scores).items() if of not in outcome.errors}

    return ModelRunnerOutput(
        req_ids=work.request_ids,
        req_id_to_index=index,
        sampled_token_ids=tokens,
        logprobs=SampledLogprobs(logprobs) if logprobs else None,
        prompt_logprobs_dict=of_good(report.prompt_logprobs if report else ()),
        prompt_token_id_logprobs_dict=of_good(report.prompt_scores if report else ()),
    )


def _counts(request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> dict[str, int]:
    """Number of tokens of each request that got any. A pooling model has no tokens."""
    by_request = zip(request_ids, tokens, strict=False)
    return {request_id: len(drawn) for request_id, drawn in by_request if drawn}


def _unanswered(
    work: Work,
    index: Mapping[str, int],
    tokens: Sequence[Sequence[int]],
    errors: Mapping[str, str],
) -> dict[str, str]:
    """Find requests of which a row was to be drawn and no token came, with no reason: each would wait
    for ever. A pooling model has no tokens."""
    if not tokens:
        return {}
    return {
        request_id: NO_ANSWER
        for request_id in (*work.sampled, *work.on_device)
        if request_id not in errors and not tokens[index[request_id]]
    }
