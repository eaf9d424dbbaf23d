"""A stage on vLLM's second runner (``vllm/v1/worker/gpu``): vLLM's default on GPUs.

The runner is vLLM's, and so is everything of a stage but three things: the tokens that come back
(:mod:`sipipe.worker.token_feedback`), sampling, and what crosses processes. Its ``execute_model``
and ``sample_tokens`` run as they are, with CUDA graphs, compiled code, LoRA, encoders and state
models as vLLM has them. ``sample`` alone is replaced, on the last stage: it computes the logits of
the rows that sample, and leaves the drawing to the samplers.

One thread is enough. The runner updates its state by kernels in the order of the stream, and
stages inputs in buffers that are there m times, so that it prepares an iteration while the device
runs the one before. Hidden states are asked for after all preparation
(:class:`sipipe.worker.world.PipelineStandIn`); results are handed on by the publisher's thread
(:mod:`sipipe.worker.publisher`).

Who runs here: the worker's main thread, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from sipipe.worker.device import Device
from sipipe.worker.logits import StageLogits
from sipipe.worker.publisher import Launched, Publisher
from sipipe.worker.token_feedback import StandInSampler, TokenFeedback


@contextmanager
def stand_ins(*, draws: bool) -> Iterator[None]:
    """While active, a second runner that vLLM makes or loads takes our parts for its own.

    ``draws``: CPU samplers do, so that vLLM's sampler is not made.
    """
    with patch.object(model_runner, "PPHandler", TokenFeedback):
        if not draws:
            yield
            return
        with patch.object(model_runner, "Sampler", StandInSampler):
            yield


def feedback_of(runner: Any, *, draws: bool) -> TokenFeedback | None:
    """What brings ``runner`` its tokens; None where its own sampler leaves them on the device.

    vLLM makes a handler only where there is more than one stage; with CPU samplers a single one
    needs it too.
    """
    if runner.pp_handler is None and draws:
        runner.pp_handler = TokenFeedback(runner.max_num_reqs, device=runner.device)
    feedback: TokenFeedback | None = runner.pp_handler
    if feedback is not None and feedback.embeds:
        feedback.states = runner.req_states
    return feedback


class SecondRunner:
    """Runs iterations on a worker's second runner, its tokens drawn by CPU samplers.

    Args:
        worker: a stage worker whose model is loaded.
        device: what the stage runs on.
    """

    def __init__(self, worker: Any, device: Device) -> None:
        runner = worker.model_runner
        self._worker = worker
        self._runner = runner
        self._device = device
        self._publisher: Publisher | None = None
        self._writes = self._reports = False
        self._output: SchedulerOutput | None = None
        self.launched: Launched | None = None
        """The iteration that is being launched."""
        self.head: StageLogits | None = None
        """Computes this rank's columns of the logits, on the last stage."""
        if runner.is_last_pp_rank:
            self.head = StageLogits(runner)
            self._no_tokens = torch.zeros(
                runner.max_num_reqs, 1, dtype=torch.int64, device=runner.device
            )
            self._none = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=runner.device)

    def take_over(self) -> None:
        """From now on CPU samplers draw, and nothing of vLLM's sampler is kept."""
        self._worker.feedback = feedback_of(self._runner, draws=True)
        if self.head is not None:
            self._runner.sample = self._sample
            self._runner.sampler = StandInSampler()

    def open(self, publisher: Publisher, *, writes: bool, reports: bool) -> None:
        """Iterations can run. ``writes``: this rank writes logits. ``reports``: it reports."""
        self._publisher, self._writes, self._reports = publisher, writes, reports

    def run(
        self,
        iteration: int,
        slot: int,
        output: SchedulerOutput,
        execute_model: Callable[[SchedulerOutput], Any],
    ) -> None:
        """Launch one iteration; returns before the device has run it.

        ``execute_model``: the worker's, which receives and sends through the pipeline group.
        """
        assert self._publisher is not None, "an iteration before the data plane was open"
        self._output = output
        self.launched = launched = Launched(
            iteration=iteration,
            slot=slot,
            num_reqs=len(output.num_scheduled_tokens),
            num_tokens=output.total_num_scheduled_tokens,
            first=self._device.mark(),
        )
        execute_model(output)
        result = self._worker.sample_tokens(None)
        launched.output = result
        launched.last = self._device.mark()
        self._output = self.launched = None
        self._publisher.put(launched)

    def received(self) -> None:
        """The stream has the hidden states of the iteration that is being launched."""
        if self.launched is not None:
            self.launched.first = self._device.mark()

    def doing(self) -> str:
        """What the launching thread does now, as a predicate."""
        launched = self.launched
        return f"launches iteration {launched.iteration}" if launched else "waits for a message"

    def _sample(
        self,
        hidden: torch.Tensor,
        batch: Any,
        grammar_output: Any,  # noqa: ARG002 - the samplers have the bitmask
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """In place of the runner's ``sample``: no request gets a token here."""
        logits = self._logits(hidden, batch)
        if self.launched is not None:
            self.launched.logits = logits if self._writes else None
            asked = self._runner.prompt_logprobs_worker.uses_prompt_logprobs[batch.idx_mapping_np]
            if self._reports and (logits is None or (asked & batch.is_prefilling_np).any()):
                self.launched.reports = True
        none = self._none[: batch.num_reqs]
        drawn = SamplerOutput(
            sampled_token_ids=self._no_tokens[: batch.num_reqs],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=none,
            num_rejected=none,
        )
        return drawn, none, none

    def _logits(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor | None:
        """Logits of the requests that get a token, in the order in which samplers know them."""
        assert self.head is not None
        rows = self._rows(batch)
        if not len(rows):
            return None
        if len(rows) == batch.num_reqs and (np.diff(rows) == 1).all():
            return self.head.compute(hidden[batch.logits_indices])
        chosen = torch_utils.async_tensor_h2d(rows, device=hidden.device)
        if self._runner.lora_config is None:
            return self.head.compute(hidden[batch.logits_indices[chosen]])
        # An adapter on the head is looked up by the row of the batch: all of them go through it.
        logits = self.head.compute(hidden[batch.logits_indices])
        return None if logits is None else logits[chosen]

    def _rows(self, batch: Any) -> npt.NDArray[np.int64]:
        """Rows of ``batch``, which vLLM has sorted, in the order of ``num_scheduled_tokens``."""
        samples = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        asked = self._output.num_scheduled_tokens if self._output is not None else batch.req_ids
        if list(asked) == batch.req_ids:
            return np.flatnonzero(samples)
        row = {req_id: index for index, req_id in enumerate(batch.req_ids)}
        order = np.fromiter((row[req_id] for req_id in asked), np.int64, len(row))
        rows: npt.NDArray[np.int64] = order[samples[order]]
        return rows
