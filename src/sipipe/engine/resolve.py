"""Results in: tokens from BIC-O and the last stage's reports become the futures' results.

Who runs here
    The gather thread sleeps on BIC-O; the events thread reports.
Guarantees
    The tracker knows an iteration's tokens before its future is resolved, so that the scheduling
    output that follows finds them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress

from vllm.logger import init_logger

from sipipe.engine.iterations import Iteration, Iterations
from sipipe.engine.output import build_output
from sipipe.engine.requests import RequestTracker
from sipipe.engine.telemetry import Telemetry
from sipipe.ipc.errors import ChannelClosed, ChannelPeerDied
from sipipe.ipc.gather import GatherReceiver
from sipipe.messages.replies import IterationReport
from sipipe.messages.step import decode_sampled
from sipipe.observe.phases import Phase

logger = init_logger(f"vllm.{__name__}")


class Resolver:
    """Resolves iterations; ``fail`` is called with what stops it."""

    def __init__(
        self,
        iterations: Iterations,
        tracker: RequestTracker,
        gather: GatherReceiver,
        telemetry: Telemetry,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._iterations = iterations
        self._tracker = tracker
        self._gather = gather
        self._telemetry = telemetry
        self._fail = fail
        self._thread = threading.Thread(target=self._collect, name="SiPipeGather", daemon=True)
        self._thread.start()

    def report(self, report: IterationReport) -> None:
        """The last stage has run an iteration that waits for its word."""
        self._resolve(
            self._iterations.deliver(report.iteration, prompt_logprobs=report.prompt_logprobs)
        )

    def close(self) -> None:
        """Close BIC-O, and wait for the thread on it."""
        self._gather.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _collect(self) -> None:
        try:
            while True:
                try:
                    number, payloads = self._gather.collect()
                except ChannelPeerDied:
                    continue  # its process's end is seen too, and a new sampler brought in
                tokens = {index: decode_sampled(data) for index, data in payloads.items()}
                self._resolve(self._iterations.deliver(number, tokens=tokens))
        except ChannelClosed:
            return
        except Exception as error:
            self._fail(error)

    def _resolve(self, iteration: Iteration | None) -> None:
        if iteration is None:
            return
        output = build_output(iteration)
        drawn = 0
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            for token in tokens:
                self._tracker.record(iteration.number, request_id, token)
                drawn += 1
        self._telemetry.record(
            Phase.GATHER, iteration, iteration.published, time.monotonic_ns(), tokens=drawn
        )
        for request_id, reason in iteration.errors.items():
            logger.error("request %s fails: %s", request_id, reason)
        with suppress(InvalidStateError):
            iteration.future.set_result(output)
