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
(:mod:`sipipe.worker.publisher`). Where the output projection is shared out, other stages than the
last have a third thread for it (:mod:`sipipe.worker.device_vocabulary`).

Who runs here: the worker's main thread, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from sipipe.worker.device import Device
from sipipe.worker.device_sampler import DeviceSampler
from sipipe.worker.device_thread import Launched
from sipipe.worker.device_vocabulary import HeadThread
from sipipe.worker.logits import StageLogits
from sipipe.worker.publisher import Publisher
from sipipe.worker.token_feedback import StandInSampler, TokenFeedback
from sipipe.worker.vocabulary import SharedHead


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
    looked_at = runner.is_first_pp_rank or requires_raw_input_tokens(runner.model)
    if feedback is not None and looked_at and (draws or not runner.is_last_pp_rank):
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
        self._shared: SharedHead | HeadThread | None = None
        self._output: SchedulerOutput | None = None
        self._drawing: DeviceSampler | None = None
        self._scored: set[str] = set()
        """Requests of which tokens are named whose log-probabilities in the prompt are wanted."""
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

    def take_over(self, *, per_row: bool = False) -> None:
        """From now on CPU samplers draw, and nothing of vLLM's sampler is kept.

        ``per_row``: not the rows that ask for no more than a temperature, which are drawn here.
        """
        self._worker.feedback = feedback_of(self._runner, draws=True)
        if self.head is not None:
            self._drawing = DeviceSampler(self._runner) if per_row else None
            self._runner.sample = self._sample
            self._runner.sampler = self._drawing or StandInSampler()

    def open(
        self,
        publisher: Publisher,
        shared: SharedHead | HeadThread | None,
        *,
        writes: bool,
        reports: bool,
    ) -> None:
        """Iterations can run.

        Args:
            publisher: hands on what they produce.
            shared: this rank's part of the output projection, where that is shared out.
            writes: this rank writes logits.
            reports: it reports.
        """
        self._publisher, self._shared = publisher, shared
        self._writes, self._reports = writes, reports

    def run(
        self,
        iteration: int,
        slot: int,
        output: SchedulerOutput,
        execute_model: Callable[[SchedulerOutput], Any],
        samples: int = 0,
    ) -> None:
        """Launch one iteration; returns before the device has run it.

        ``execute_model``: the worker's, which receives and sends through the pipeline group.
        ``samples``: rows of logits that samplers get.
        """
        assert self._publisher is not None, "an iteration before the data plane was open"
        self._output = output
        self._scored.difference_update(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.prompt_logprob_token_ids is not None:
                self._scored.add(new.req_id)
        with self._shared.alone if isinstance(self._shared, HeadThread) else nullcontext():
            self.launched = launched = Launched(
                iteration=iteration,
                slot=slot,
                num_reqs=len(output.num_scheduled_tokens),
                num_tokens=output.total_num_scheduled_tokens,
                samples=samples,
                first=self._device.mark(),
            )
            execute_model(output)
            result = self._worker.sample_tokens(None)
        launched.output = result
        launched.last = self._device.mark()
        self._output = self.launched = None
        self._publisher.put(launched)
        if samples and isinstance(self._shared, HeadThread):
            self._shared.put(launched)

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
        """In place of the runner's ``sample``: no request gets a token here.

        Tokens that are drawn on the device go to the engine, which accepts them as a sampler's.
        """
        rows, sent = self._rows(batch)
        logits, chosen = self._logits(hidden, batch, rows)
        tokens = self._no_tokens[: batch.num_reqs]
        if logits is not None and sent < len(rows):
            assert self.head is not None
            whole = self.head.whole(logits[sent:])
            # One rank says the tokens; a warm-up compiles on all.
            if whole is not None and (self._reports or self.launched is None):
                here = slice(sent, None) if chosen is None else chosen[sent:]
                tokens = self._draw(whole, batch, here)
        if (launched := self.launched) is not None:
            if logits is not None and sent and self._writes:
                launched.logits = logits[:sent]
            launched.draws = sent < len(rows)
            asked = self._runner.prompt_logprobs_worker.uses_prompt_logprobs[batch.idx_mapping_np]
            if self._scored:
                asked = asked | [req_id in self._scored for req_id in batch.req_ids]
            scores = (asked & batch.is_prefilling_np).any()
            launched.reports = self._reports and bool(launched.draws or not sent or scores)
        none = self._none[: batch.num_reqs]
        drawn = SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=none,
            num_rejected=none,
        )
        return drawn, none, none

    def _draw(self, logits: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:
        """[n, 1], tokens of the requests in ``rows`` of ``batch``, of which these are the logits."""
        assert self._drawing is not None
        positions = batch.positions[batch.logits_indices[rows]]
        return self._drawing.draw(logits, batch.idx_mapping[rows], positions).unsqueeze(1)

    def _logits(
        self, hidden: torch.Tensor, batch: Any, rows: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits of ``rows`` of the batch, and the rows on the device; None: all, in order."""
        assert self.head is not None
        if not len(rows):
            return None, None
        if len(rows) == batch.num_reqs and (np.diff(rows) == 1).all():
            return self._project(hidden[batch.logits_indices]), None
        chosen = torch_utils.async_tensor_h2d(rows, device=hidden.device)
        if self._runner.lora_config is None:
            return self._project(hidden[batch.logits_indices[chosen]]), chosen
        # An adapter on the head is looked up by the row of the batch: all of them go through it.
        logits = self.head.compute(hidden[batch.logits_indices])
        return None if logits is None else logits[chosen], chosen

    def _project(self, rows: torch.Tensor) -> torch.Tensor | None:
        """This rank's columns of the logits of final hidden states [n, H]."""
        assert self.head is not None
        if self.launched is None or not isinstance(self._shared, SharedHead):
            return self.head.compute(rows)
        self.launched.made = self._device.mark()
        self._shared.spread(self.launched, rows)
        return self._shared.shard.whole(rows)

    def _rows(self, batch: Any) -> tuple[npt.NDArray[np.int64], int]:
        """Rows of ``batch``, which vLLM has sorted, whose requests get a token, in the order of
        ``num_scheduled_tokens``: first the samplers', then those drawn here. And how many of the
        former."""
        samples = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        asked = self._output.num_scheduled_tokens if self._output is not None else batch.req_ids
        if list(asked) == batch.req_ids:
            rows = np.flatnonzero(samples)
        else:
            row = {req_id: index for index, req_id in enumerate(batch.req_ids)}
            order = np.fromiter((row[req_id] for req_id in asked), np.int64, len(row))
            rows = order[samples[order]]
        if self._drawing is None:
            return rows, len(rows)
        here = self._drawing.plain[batch.idx_mapping_np[rows]]
        return np.concatenate((rows[~here], rows[here])), len(rows) - int(here.sum())
