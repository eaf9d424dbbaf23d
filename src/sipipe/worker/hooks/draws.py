"""Draws the tokens of a stage on vLLM's second runner, or leaves that to the CPU samplers.

Where CPU samplers draw, the runner's ``sample`` is replaced on the last stage: it computes the
logits of the rows that sample, and leaves the drawing to the samplers, or to the device for rows
that ask for no more than a temperature. Elsewhere the last stage samples as vLLM does
(:class:`WholeBatch`), and the engine gets the runner's output.

Who runs here: the device thread; before the first iteration, the thread that reads BIC-I, which also
calls ``restrict``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncPoolingOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from sipipe.worker.device import Device, Launched
from sipipe.worker.hooks.device_sampler import DeviceSampler
from sipipe.worker.hooks.preparation import StandInSampler, TokenFeedback
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.request_state import scheduling_order
from sipipe.worker.late_input import LateInput
from sipipe.worker.projection.logits import LogitsHandover, StageLogits
from sipipe.worker.projection.projection import Projection

Rows = npt.NDArray[np.int64]
"""Rows of logits of a batch, [n]."""


@contextmanager
def stand_ins(*, own_sampler: bool) -> Iterator[None]:
    """While active, a second runner that vLLM makes or loads takes our parts for its own.

    Args:
        own_sampler: True if it has vLLM's sampler of that runner, and custom logits processors of its
            kind.
    """
    with (
        patch.object(model_runner, "PPHandler", TokenFeedback),
        # A head is loaded beside the runner (:mod:`sipipe.worker.hooks.head`), which has it only where
        # vLLM's own sampler draws.
        patch.object(model_runner, "init_speculator", lambda *_: None),
    ):
        if own_sampler:
            yield
            return
        with (
            patch.object(model_runner, "Sampler", StandInSampler),
            patch.object(model_runner, "build_custom_logits_processors", lambda *_: ()),
        ):
            yield


def feedback_of(runner: Any, *, draws: bool) -> TokenFeedback | None:
    """The handler that brings ``runner`` its tokens; None where its own sampler leaves them on the device.

    vLLM makes a handler only for several stages; with CPU samplers a single one needs it too.

    Args:
        draws: True if CPU samplers draw.
    """
    if runner.pp_handler is None and draws:
        runner.pp_handler = TokenFeedback(runner.max_num_reqs, device=runner.device)
    feedback: TokenFeedback | None = runner.pp_handler
    reads_tokens = runner.is_first_pp_rank or requires_raw_input_tokens(runner.model)
    has_none = draws or not runner.is_last_pp_rank  # vLLM's sampler writes into the states itself
    if feedback is not None and reads_tokens and has_none:
        feedback.states = runner.req_states
    return feedback


class NothingDrawn:
    """Drawing on a stage that draws nothing: every one but the last."""

    stage_logits: StageLogits | None = None
    """Logits of this rank's columns; None: there are none here."""
    projection = Projection()
    """This rank's part of the output projection."""
    reads_states = False
    """True if the runner's request states are read, which rot where SiPipe prepares."""
    decode_tokens = 1
    """Tokens of a request with all its drafts, where vLLM's runner verifies them on the last stage, and
    orders its batches by them; else 1."""

    def take_over(self, *, per_row: bool) -> "NothingDrawn":  # noqa: ARG002
        """Have CPU samplers draw from now on, and keep nothing of vLLM's sampler.

        Args:
            per_row: True if rows that ask for no more than a temperature are drawn on the device.

        Returns:
            The drawing to use from now on.
        """
        return self

    def open(self, projection: Projection, logits: LogitsHandover | None) -> None:
        """Make ready for iterations: with this part of the output projection, and writer of BIC-L."""

    def begin(self, launched: Launched) -> None:
        """Prepare for an iteration, which is launched next."""

    def restrict(self, iteration: int, output: GrammarOutput | None) -> None:
        """Take the grammars' bitmasks of ``iteration``; None: a grammar restricts none of its tokens.
        Called by the thread that reads BIC-I."""

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        """The result of vLLM's ``worker`` for an iteration whose ``execute_model`` returned ``output``."""
        return worker.sample_tokens(None)

    def end(self) -> None:
        """Note that the iteration is launched."""

    def close(self) -> None:
        """End a wait for a grammar; the process ends."""


class WholeBatch(NothingDrawn):
    """Drawing by vLLM's own sampler, of all rows, on the last stage.

    Args:
        reports: True if this rank tells the engine what was drawn.
        stall_timeout: Seconds to wait for the engine's grammar, which it makes meanwhile.
    """

    reads_states = True

    def __init__(self, *, reports: bool, stall_timeout: float) -> None:
        self._reports = reports
        self._grammars = LateInput("grammar", stall_timeout)

    def begin(self, launched: Launched) -> None:
        launched.whole = self._reports
        launched.reports = self._reports

    def restrict(self, iteration: int, output: GrammarOutput | None) -> None:
        self._grammars.put(iteration, output)

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        grammar = None
        if inputs.output.has_structured_output_requests:
            grammar = self._grammars.take(inputs.iteration)
        return worker.sample_tokens(grammar)

    def close(self) -> None:
        self._grammars.close()


class Pooled(WholeBatch):
    """Stages of a pooling model: nothing is drawn, and ``execute_model`` returns the whole result."""

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        if isinstance(output, AsyncPoolingOutput):
            # wait: none, of the stream: the next pass may write what is copied; the copy
            output.copy_event.wait()
        return output


class LastRows(NothingDrawn):
    """Logits of the rows that sample, on the last stage; CPU samplers draw from them.

    Args:
        reports: True if this rank tells the engine what samplers do not.
    """

    def __init__(
        self, runner: Any, device: Device, stage_logits: StageLogits, *, reports: bool
    ) -> None:
        self._runner = runner
        self._device = device
        self._reports = reports
        self.stage_logits: StageLogits = stage_logits
        self.projection = Projection(stage_logits)
        requests = int(runner.max_num_reqs)
        self._no_tokens = torch.zeros(requests, 1, dtype=torch.int64, device=runner.device)
        self._zeros = torch.zeros(requests, dtype=torch.int32, device=runner.device)
        self._place_for: Callable[..., torch.Tensor | None] = lambda *_: None
        """Place in BIC-L for the logits of some rows, to be written without a copy; None: there is none."""
        self._writes = False
        """True if this rank writes BIC-L."""
        self._scored: set[str] = set()
        """Requests with a list of tokens whose log-probabilities in the prompt are wanted."""
        self._launched: Launched | None = None
        """The iteration that is being launched; None: a warm-up, or a measurement."""

    def take_over(self, *, per_row: bool) -> "LastRows":
        drawing: LastRows = self
        if per_row:
            drawing = SomeDrawnHere(
                self._runner, self._device, self.stage_logits, reports=self._reports
            )
        requests = int(self._runner.max_num_reqs)
        drawing._stand_in(StandInSampler(max_num_reqs=requests, device=self._runner.device))
        return drawing

    def _stand_in(self, sampler: StandInSampler) -> None:
        """Stand where the runner samples, with ``sampler`` in the place of its own."""
        self._vllm_sample_tokens = self._runner.sample_tokens
        self._runner.sample_tokens = self._sample_tokens
        self._runner.sample = self._sample
        self._runner.sampler = sampler

    def open(self, projection: Projection, logits: LogitsHandover | None) -> None:
        self.projection = projection
        if logits is not None:
            self._place_for = logits.place_for
            self._writes = True

    def begin(self, launched: Launched) -> None:
        self._launched = launched
        output = launched.inputs.output
        self._scored.difference_update(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.prompt_logprob_token_ids is not None:
                self._scored.add(new.req_id)

    def end(self) -> None:
        self._launched = None

    def _sample_tokens(self, grammar_output: Any) -> Any:
        """Stand in the place of the runner's ``sample_tokens``, which makes an output that is copied to
        the host: a stream's wait, two copies and an event that only a reported iteration needs."""
        launched = self._launched
        state = self._runner.execute_model_state
        if launched is None or state is None:
            return self._vllm_sample_tokens(grammar_output)
        batch = state.input_batch
        rows, sent = self._rows(launched.inputs, batch)
        if self._is_awaited(batch, launched, len(rows), sent):
            return self._vllm_sample_tokens(grammar_output)
        # The rest is what vLLM's does with an iteration, without the output.
        self._runner.execute_model_state = None
        tokens = self._hand_over(state.hidden_states, batch, launched, rows, sent)
        zeros = self._zeros[: batch.num_reqs]
        self._runner.postprocess_sampled(
            batch.idx_mapping, tokens, zeros, zeros, batch.query_start_loc
        )
        ended = launched.inputs.output.finished_req_ids
        launched.kv = self._runner.kv_connector.post_forward(ended)
        return None

    def _sample(
        self,
        hidden: torch.Tensor,
        batch: Any,
        grammar_output: Any,  # noqa: ARG002 - the samplers have the bitmask
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Stand in the place of the runner's ``sample``: no request gets a token here. Tokens that are
        drawn on the device go to the engine, which accepts them as a sampler's."""
        launched = self._launched
        if launched is None:
            drawn = self._rehearse(hidden, batch)
        else:
            rows, sent = self._rows(launched.inputs, batch)
            self._is_awaited(batch, launched, len(rows), sent)
            drawn = self._hand_over(hidden, batch, launched, rows, sent)
        zeros = self._zeros[: batch.num_reqs]
        output = SamplerOutput(
            sampled_token_ids=drawn,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=zeros,
            num_rejected=zeros,
        )
        return output, zeros, zeros

    def _rehearse(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        """Project and draw all rows, as a warm-up has to compile it."""
        logits = self.stage_logits.compute(hidden[batch.logits_indices])
        if logits is not None:
            self._drawn(logits, batch, slice(None))
        return self._no_tokens[: batch.num_reqs]

    def _is_awaited(self, batch: Any, launched: Launched, rows: int, sent: int) -> bool:
        """Say if the engine waits for this stage's report, whichever rank sends it: for tokens that are
        drawn here (of ``rows`` rows, samplers get ``sent``), for prompt scores, or for lack of any."""
        launched.draws = sent < rows
        scored = self._runner.prompt_logprobs_worker.uses_prompt_logprobs[batch.idx_mapping_np]
        if self._scored:
            scored = scored | [req_id in self._scored for req_id in batch.req_ids]
        awaited = bool(launched.draws or not sent or (scored & batch.is_prefilling_np).any())
        launched.reports = self._reports and awaited
        return awaited

    def _hand_over(
        self, hidden: torch.Tensor, batch: Any, launched: Launched, rows: Rows, sent: int
    ) -> torch.Tensor:
        """Compute the logits of ``rows``, and hand the first ``sent`` of them to the samplers.

        Args:
            hidden: [T, H], of all tokens of the batch.

        Returns:
            Tokens [n, 1] int64 on the device that were drawn here; zeros where there are none.
        """
        if not len(rows):
            return self._no_tokens[: batch.num_reqs]
        launched.made = self._device.mark()
        all_sent = sent == len(rows)
        logits, chosen = self._logits(hidden, batch, rows, launched.inputs, all_sent=all_sent)
        if logits is None:  # this rank has no columns
            return self._no_tokens[: batch.num_reqs]
        if sent and self._writes:
            launched.logits = logits[:sent]
        if all_sent:
            return self._no_tokens[: batch.num_reqs]
        drawn_here = slice(sent, None) if chosen is None else chosen[sent:]
        return self._drawn(logits[sent:], batch, drawn_here)

    def _drawn(self, columns: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:  # noqa: ARG002
        """Tokens [n, 1] int64 of the requests in ``rows`` of ``batch``. Every rank calls it.

        Args:
            columns: [n, V of this rank], this rank's part of their logits.
            rows: Indices on the device, or a slice.
        """
        return self._no_tokens[: batch.num_reqs]

    def _logits(
        self, hidden: torch.Tensor, batch: Any, rows: Rows, inputs: ModelInput, *, all_sent: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits [n, V of this rank] of ``rows``, and these rows on the device; None for the rows: all
        that the batch has, in order.

        Args:
            all_sent: True if all go to the samplers.
        """

        def project(states: torch.Tensor) -> torch.Tensor | None:
            place = self._place_for(inputs.logits_row, states) if all_sent else None
            return self.projection.columns(inputs, states, place)

        if len(rows) == len(batch.logits_indices) and (rows[1:] > rows[:-1]).all():
            # Where all decode, each row of the hidden states is one that samples, and none is copied.
            # Not on a GPU: a graph's next replay would overwrite them on their way to other stages.
            only_decodes = len(rows) == len(hidden) == batch.num_tokens
            if hidden.is_cpu and only_decodes:
                return project(hidden), None
            return project(hidden[batch.logits_indices]), None
        chosen = torch_utils.async_tensor_h2d(rows, device=hidden.device)
        if self._runner.lora_config is None:
            return project(hidden[batch.logits_indices[chosen]]), chosen
        # An adapter on the projection is looked up by the row of the batch: all of them go through it.
        logits = self.stage_logits.compute(hidden[batch.logits_indices])
        return None if logits is None else logits[chosen], chosen

    def _rows(self, inputs: ModelInput, batch: Any) -> tuple[Rows, int]:
        """Rows of logits of ``batch`` to draw tokens from, and how many of them the samplers get.

        Both parts are ordered as ``num_scheduled_tokens``: first the samplers', then those drawn here,
        which have no drafts.
        """
        rows = inputs.logits_rows
        if rows is None:  # vLLM has prepared, and sorted
            rows = sampling_rows(inputs.output, batch)
        return rows, len(rows)


class SomeDrawnHere(LastRows):
    """Drawing on the device of the rows that ask for no more than a temperature."""

    def _stand_in(self, sampler: StandInSampler) -> None:  # noqa: ARG002
        self._sampler = DeviceSampler(self._runner)
        super()._stand_in(self._sampler)

    def _drawn(self, columns: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:
        logits = self.stage_logits.gather_rows(columns)
        if logits is None or not self._reports:  # one rank reports the tokens
            return super()._drawn(columns, batch, rows)
        positions = batch.positions[batch.logits_indices[rows]]
        return self._sampler.draw(logits, batch.idx_mapping[rows], positions).unsqueeze(1)

    def _rows(self, inputs: ModelInput, batch: Any) -> tuple[Rows, int]:
        rows, count = super()._rows(inputs, batch)
        plain = self._sampler.plain[batch.idx_mapping_np[rows]]
        if not plain.any():
            return rows, count
        return np.concatenate((rows[~plain], rows[plain])), count - int(plain.sum())


def sampling_rows(output: SchedulerOutput, batch: Any) -> Rows:
    """Rows of ``batch`` whose requests get a token, in the order of ``output``."""
    samples = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
    order = scheduling_order(batch.req_ids, output.num_scheduled_tokens)
    rows: Rows = order[samples[order]]
    return rows
