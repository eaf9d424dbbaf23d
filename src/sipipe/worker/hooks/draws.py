"""What draws the tokens of a stage on vLLM's second runner.

Where CPU samplers draw, the runner's ``sample`` is replaced on the last stage: it computes the
logits of the rows that sample, and leaves the drawing to the samplers, or to the device for rows
that ask for no more than a temperature. Elsewhere the last stage samples as vLLM does
(:class:`WholeBatch`), and the engine gets the runner's output.

Who runs here: the device thread; before the first iteration, whoever follows BIC-I.
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


@contextmanager
def stand_ins(*, own_sampler: bool) -> Iterator[None]:
    """While active, a second runner that vLLM makes or loads takes our parts for its own.
    ``own_sampler``: it has vLLM's sampler of that runner, and custom logits processors of its kind."""
    with patch.object(model_runner, "PPHandler", TokenFeedback):
        if own_sampler:
            yield
            return
        with (
            patch.object(model_runner, "Sampler", StandInSampler),
            patch.object(model_runner, "build_custom_logits_processors", lambda *_: ()),
        ):
            yield


def feedback_of(runner: Any, *, draws: bool) -> TokenFeedback | None:
    """What brings ``runner`` its tokens; None where its own sampler leaves them on the device. vLLM
    makes a handler only for several stages; with CPU samplers a single one needs it too."""
    if runner.pp_handler is None and draws:
        runner.pp_handler = TokenFeedback(runner.max_num_reqs, device=runner.device)
    feedback: TokenFeedback | None = runner.pp_handler
    looked_at = runner.is_first_pp_rank or requires_raw_input_tokens(runner.model)
    if feedback is not None and looked_at and (draws or not runner.is_last_pp_rank):
        feedback.states = runner.req_states
    return feedback


class NothingDrawn:
    """On every stage but the last."""

    stage_logits: StageLogits | None = None
    """Computes this rank's columns of the logits; None: there are none here."""
    projection = Projection()
    reads_states = False
    """Whether the runner's request states are looked at, which rot where SiPipe prepares."""

    def take_over(self, *, per_row: bool) -> "NothingDrawn":  # noqa: ARG002
        """From now on CPU samplers draw, and nothing of vLLM's sampler is kept. ``per_row``: not
        the rows that ask for no more than a temperature, which what this returns draws here."""
        return self

    def open(self, projection: Projection, logits: LogitsHandover | None) -> None:
        """Iterations can run: with this part of the output projection, and writer of BIC-L."""

    def begin(self, launched: Launched) -> None:
        """An iteration is launched next."""

    def restrict(self, iteration: int, output: GrammarOutput | None) -> None:
        """Whoever follows BIC-I: what the next token of some requests of ``iteration`` may be."""

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        """What vLLM's ``worker`` makes of an iteration whose ``execute_model`` gave ``output``."""
        return worker.sample_tokens(None)

    def end(self) -> None:
        """It is launched."""

    def close(self) -> None:
        """End a wait for a grammar; the process ends."""


class WholeBatch(NothingDrawn):
    """On the last stage: vLLM's own sampler draws all rows. ``reports``: this rank tells the engine
    what came; ``stall_timeout``: seconds to wait for the engine's grammar, made meanwhile."""

    reads_states = True

    def __init__(self, *, reports: bool, stall_timeout: float) -> None:
        self._reports = reports
        self._grammars = LateInput("grammar", stall_timeout)

    def begin(self, launched: Launched) -> None:
        launched.whole = launched.reports = self._reports

    def restrict(self, iteration: int, output: GrammarOutput | None) -> None:
        self._grammars.put(iteration, output)

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        restricted = inputs.output.has_structured_output_requests
        return worker.sample_tokens(self._grammars.take(inputs.iteration) if restricted else None)

    def close(self) -> None:
        self._grammars.close()


class Pooled(WholeBatch):
    """On every stage of a pooling model, of which ``execute_model`` returns all there is."""

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:  # noqa: ARG002
        if isinstance(output, AsyncPoolingOutput):
            # wait: none, of the stream: the next pass may write what is copied; the copy
            output.copy_event.wait()
        return output


class LastRows(NothingDrawn):
    """On the last stage: logits of rows, which samplers draw. ``reports``: it says what they do not."""

    def __init__(
        self, runner: Any, device: Device, stage_logits: StageLogits, *, reports: bool
    ) -> None:
        self._runner = runner
        self._device = device
        self._reports = reports
        self.stage_logits: StageLogits = stage_logits
        self.projection = Projection(stage_logits)
        requests, there = runner.max_num_reqs, runner.device
        self._no_tokens = torch.zeros(requests, 1, dtype=torch.int64, device=there)
        self._none = torch.zeros(requests, dtype=torch.int32, device=there)
        self._ahead: Callable[..., torch.Tensor | None] = lambda *_: None
        self._writes = False
        self._scored: set[str] = set()
        """Requests of which tokens are named whose log-probabilities in the prompt are wanted."""
        self._now: Launched | None = None
        """The iteration that is being launched; None: a warm-up, or a measurement."""

    def take_over(self, *, per_row: bool) -> "LastRows":
        told = self._runner, self._device, self.stage_logits
        taking = SomeDrawnHere(*told, reports=self._reports) if per_row else self
        rows = int(self._runner.max_num_reqs)
        taking._stand_in(StandInSampler(max_num_reqs=rows, device=self._runner.device))
        return taking

    def _stand_in(self, sampler: StandInSampler) -> None:
        """Stand where the runner samples, with ``sampler`` in the place of its own."""
        self._sample_tokens = self._runner.sample_tokens
        self._runner.sample_tokens = self._finish
        self._runner.sample = self._sample
        self._runner.sampler = sampler

    def open(self, projection: Projection, logits: LogitsHandover | None) -> None:
        self.projection = projection
        if logits is not None:
            self._ahead, self._writes = logits.place_for, True

    def begin(self, launched: Launched) -> None:
        self._now, output = launched, launched.inputs.output
        self._scored.difference_update(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.prompt_logprob_token_ids is not None:
                self._scored.add(new.req_id)

    def end(self) -> None:
        self._now = None

    def _finish(self, grammar_output: Any) -> Any:
        """In place of the runner's ``sample_tokens``, which makes an output that is copied to the
        host: a stream's wait, two copies and an event that only a reported iteration needs."""
        launched, state = self._now, self._runner.execute_model_state
        if launched is None or state is None:
            return self._sample_tokens(grammar_output)
        batch, inputs = state.input_batch, launched.inputs
        rows, sent = self._rows(inputs, batch)
        if self._is_awaited(batch, launched, len(rows), sent):
            return self._sample_tokens(grammar_output)
        self._runner.execute_model_state = None
        tokens = self._hand_over(state.hidden_states, batch, launched, rows, sent)
        none = self._none[: batch.num_reqs]
        self._runner.postprocess_sampled(
            batch.idx_mapping, tokens, none, none, batch.query_start_loc
        )
        launched.kv = self._runner.kv_connector.post_forward(inputs.output.finished_req_ids)
        return None

    def _sample(
        self,
        hidden: torch.Tensor,
        batch: Any,
        grammar_output: Any,  # noqa: ARG002 - the samplers have the bitmask
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """In place of the runner's ``sample``: no request gets a token here. Tokens that are drawn
        on the device go to the engine, which accepts them as a sampler's."""
        launched = self._now
        if launched is None:
            drawn = self._rehearse(hidden, batch)
        else:
            rows, sent = self._rows(launched.inputs, batch)
            self._is_awaited(batch, launched, len(rows), sent)
            drawn = self._hand_over(hidden, batch, launched, rows, sent)
        none = self._none[: batch.num_reqs]
        told = {"logprobs_tensors": None, "num_nans": None, "num_rejected": none}
        return SamplerOutput(sampled_token_ids=drawn, num_sampled=none, **told), none, none

    def _rehearse(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        """All rows: what a warm-up has to compile."""
        logits = self.stage_logits.compute(hidden[batch.logits_indices])
        if logits is not None:
            self._drawn(logits, batch, slice(None))
        return self._no_tokens[: batch.num_reqs]

    def _is_awaited(self, batch: Any, launched: Launched, rows: int, sent: int) -> bool:
        """Whether the engine waits for this stage's word, whichever rank says it: for tokens that
        are drawn here (of ``rows``, samplers get ``sent``), for prompt scores, or for lack of any."""
        launched.draws = sent < rows
        asked = self._runner.prompt_logprobs_worker.uses_prompt_logprobs[batch.idx_mapping_np]
        if self._scored:
            asked = asked | [req_id in self._scored for req_id in batch.req_ids]
        awaited = bool(launched.draws or not sent or (asked & batch.is_prefilling_np).any())
        launched.reports = self._reports and awaited
        return awaited

    def _hand_over(
        self, hidden: torch.Tensor, batch: Any, launched: Launched, rows: Rows, sent: int
    ) -> torch.Tensor:
        if len(rows):
            launched.made = self._device.mark()
            alone = sent == len(rows)
            logits, chosen = self._logits(hidden, batch, rows, launched.inputs, alone=alone)
            if logits is not None and sent and self._writes:
                launched.logits = logits[:sent]
            if logits is not None and not alone:
                here = slice(sent, None) if chosen is None else chosen[sent:]
                return self._drawn(logits[sent:], batch, here)
        return self._no_tokens[: batch.num_reqs]

    def _drawn(self, columns: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:  # noqa: ARG002
        """[n, 1], tokens of the requests in ``rows`` of ``batch``, of whose logits these are this
        rank's columns; every rank calls it."""
        return self._no_tokens[: batch.num_reqs]

    def _logits(
        self, hidden: torch.Tensor, batch: Any, rows: Rows, inputs: ModelInput, *, alone: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits of ``rows`` of those that the batch could have, and these on the device; None: all,
        in order. ``alone``: all go to the samplers."""

        def project(chosen: torch.Tensor) -> torch.Tensor | None:
            into = self._ahead(inputs.logits_row, chosen) if alone else None
            return self.projection.columns(inputs, chosen, into)

        if len(rows) == len(batch.logits_indices) and (rows[1:] > rows[:-1]).all():
            # Decoding alone, each row of the hidden states is one that samples. Not on a GPU: a
            # graph's next replay would overwrite them on their way to other stages.
            whole = hidden.is_cpu and len(rows) == len(hidden) == batch.num_tokens
            return project(hidden if whole else hidden[batch.logits_indices]), None
        chosen = torch_utils.async_tensor_h2d(rows, device=hidden.device)
        if self._runner.lora_config is None:
            return project(hidden[batch.logits_indices[chosen]]), chosen
        # An adapter on the projection is looked up by the row of the batch: all of them go through it.
        logits = self.stage_logits.compute(hidden[batch.logits_indices])
        return None if logits is None else logits[chosen], chosen

    def _rows(self, inputs: ModelInput, batch: Any) -> tuple[Rows, int]:
        """Rows of logits of ``batch`` to draw tokens from, ordered as ``num_scheduled_tokens``:
        first the samplers', and how many those are, then those drawn here, which have no drafts."""
        if (rows := inputs.logits_rows) is None:  # vLLM has prepared, and sorted
            rows = sampling_rows(inputs.output, batch)
        return rows, len(rows)


class SomeDrawnHere(LastRows):
    """The rows that ask for no more than a temperature are drawn on the device."""

    def _stand_in(self, sampler: StandInSampler) -> None:  # noqa: ARG002
        self._sampler = DeviceSampler(self._runner)
        super()._stand_in(self._sampler)

    def _drawn(self, columns: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:
        logits = self.stage_logits.gather_rows(columns)
        if logits is None or not self._reports:  # one rank says the tokens
            return super()._drawn(columns, batch, rows)
        positions = batch.positions[batch.logits_indices[rows]]
        return self._sampler.draw(logits, batch.idx_mapping[rows], positions).unsqueeze(1)

    def _rows(self, inputs: ModelInput, batch: Any) -> tuple[Rows, int]:
        rows, count = super()._rows(inputs, batch)
        if not (here := self._sampler.plain[batch.idx_mapping_np[rows]]).any():
            return rows, count
        return np.concatenate((rows[~here], rows[here])), count - int(here.sum())


def sampling_rows(output: SchedulerOutput, batch: Any) -> Rows:
    """Rows of ``batch`` whose requests get a token, in the order of ``output``."""
    samples = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
    order = scheduling_order(batch.req_ids, output.num_scheduled_tokens)
    found: Rows = order[samples[order]]
    return found
