"""Drafts of a head, verified and proposed on the last stage's device in the pass that they belong to.

vLLM's runner does this by itself where it is made with its speculator: its ``sample`` draws the rows of
a request's last token and of its drafts, and its ``sample_tokens`` then has the speculator propose. Here
are the parts beside that: the drafts that the engine has scheduled go into the runner's states, and the
new ones come out with the tokens.

A draft is right where vLLM's sampler draws it: each row is drawn as without drafts, with the same seed,
position and penalties. So a seeded request's tokens are those without drafts.

Rejected: vLLM's ``RejectionSampler``. It accepts a draft with the probability that the target gives it,
and draws anew where it does not. With a head that proposes its likeliest token, as heads do here, a draft
is accepted as often. But the tokens then depend on the drafts, of which there are as many as are worth
it: by measured times.

Who runs here: the device thread; the publisher's thread in :meth:`CopiedDrafts.read`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from sipipe.best_effort import BestEffort
from sipipe.worker.agreement import run_alike
from sipipe.worker.device import Launched
from sipipe.worker.hooks.draws import WholeBatch
from sipipe.worker.inputs.model_input import ModelInput

NO_DRAFT = -1
"""vLLM's number of a draft that was not proposed."""


class DraftingBatch(WholeBatch):
    """Drawing by vLLM's own sampler, of all rows, with a head that proposes behind them.

    Args:
        runner: vLLM's, made with the head's configuration.
        speculator: the head; the runner has it propose from now on.
        reports: True if this rank tells the engine what was drawn.
        stall_timeout: Seconds to wait for the engine's grammar, which it makes meanwhile.
        compare: takes what a pass of the head has raised on this rank, or None, and raises where the
            other ranks' passes ended in another way (:mod:`sipipe.worker.agreement`).
    """

    def __init__(
        self,
        runner: Any,
        speculator: Any,
        *,
        reports: bool,
        stall_timeout: float,
        compare: Callable[[Exception | None], None] = lambda _: None,
    ) -> None:
        super().__init__(reports=reports, stall_timeout=stall_timeout)
        self._runner = runner
        self._steps = int(speculator.num_speculative_steps)
        self._copies = DraftCopies(runner.device)
        let_speculate(runner, speculator)
        # Drafts only save time: no pass of the head that fails is an error of the iteration.
        self._proposing = BestEffort("drafts of a head", bounded=False)
        self._compare = compare
        self._propose = speculator.propose
        if runner.model_config.is_multimodal_model:
            self._propose = of_known_tokens(speculator.propose, int(speculator.vocab_size))
        speculator.propose = self._try_to_propose
        runner.rejection_sampler = StrictVerifier(runner.sampler, most=self._steps)
        runner.draft_tokens_handler = self._copies
        nothing = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        self._launched = Launched(inputs=nothing)
        """The iteration that is being launched, or was last."""

    def begin(self, launched: Launched) -> None:
        super().begin(launched)
        self._launched = launched
        self._write_drafts(launched.inputs.output)

    @torch.inference_mode()
    def _write_drafts(self, output: SchedulerOutput) -> None:
        """Write the drafts that the engine has scheduled into the runner's states: it leaves out those
        that are not worth their rows, and a grammar may force others."""
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return
        states = self._runner.req_states
        # One copy to the device for both: the row of each request, and its drafts.
        table = np.zeros((len(drafts), 1 + self._steps), np.int64)
        for place, (name, tokens) in enumerate(drafts.items()):
            table[place, 0] = states.req_id_to_index[name]
            table[place, 1 : 1 + len(tokens)] = tokens
        rows_and_drafts = torch_utils.async_tensor_h2d(table, device=self._runner.device)
        states.draft_tokens[rows_and_drafts[:, 0]] = rows_and_drafts[:, 1:]

    def _try_to_propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand in the place of the speculator's ``propose``: where it raises, there are no drafts, [B, k]
        of -1."""
        none = torch.full((input_batch.num_reqs, self._steps), NO_DRAFT, device=self._runner.device)
        return run_alike(
            self._compare, self._proposing, none, self._propose, input_batch, *args, **kwargs
        )

    def finish(self, worker: Any, inputs: ModelInput, output: Any) -> Any:
        result = super().finish(worker, inputs, output)
        self._launched.drafts = self._copies.take()
        return result


def of_known_tokens(propose: Callable[..., Any], vocabulary: int) -> Callable[..., Any]:
    """``propose`` of vLLM's speculator for a target that sees. What stands for an image in the prompt may
    be no token of the text's ``vocabulary``, and is given to the head as its last one."""
    signature = inspect.signature(propose)

    def proposing(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        batch = arguments["input_batch"]
        following = arguments["next_prefill_tokens"]
        tokens = batch.input_ids.clamp(0, vocabulary - 1)
        arguments["input_batch"] = replace(batch, input_ids=tokens)
        arguments["next_prefill_tokens"] = following.clamp(0, vocabulary - 1)
        return propose(**arguments)

    return proposing


def let_speculate(runner: Any, speculator: Any) -> None:
    """Have ``runner``, which was made with the head's configuration, propose by ``speculator``."""
    runner.speculator = speculator
    _take_drafts(runner, speculator.num_speculative_steps)


def hold_back(runner: Any) -> None:
    """Have ``runner``, which was made with a head's configuration, warm up and run as without, until it
    is known who draws."""
    runner.speculator = None
    _take_drafts(runner, 0)


def _take_drafts(runner: Any, most: int) -> None:
    """Have ``runner`` take so many drafts of each request, at most."""
    runner.num_speculative_steps = most
    runner.decode_query_len = 1 + most
    if runner.structured_outputs_worker is not None:
        # The rows of a bitmask that each request has, in vLLM 0.33's warm-up too.
        runner.structured_outputs_worker.mask_stride = runner.decode_query_len


class StrictVerifier:
    """Verifier in the place of vLLM's ``RejectionSampler``: a draft is right if ``sampler`` draws it.

    Args:
        sampler: vLLM's, which draws each row of logits by the parameters of its request.
        most: drafts of a request, at most.
    """

    def __init__(self, sampler: Any, *, most: int) -> None:
        self._sampler = sampler
        self._most = most

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,  # noqa: ARG002 - the head proposes its likeliest
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Draw rows of logits [R, V], of which each of B requests has one more than drafts.

        Args:
            invalid_drafts: [R], true at drafts that a grammar does not allow.

        Returns vLLM's output: tokens [B, 1 + ``most``], of which each request has ``num_sampled`` [B].
        """
        output: SamplerOutput = self._sampler(logits, input_batch)
        drafts = input_batch.input_ids[input_batch.logits_indices].long()
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, -1)
        tokens, counts = leading(
            output.sampled_token_ids[:, 0], drafts, input_batch.cu_num_logits, self._most
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            counts,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._sampler.req_states.prefill_len.gpu,
        )
        return replace(
            output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected
        )


def leading(
    drawn: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each request up to the first that is not its draft, without a wait for the device.

    Args:
        drawn: [R], the token drawn at each row of logits.
        drafts: [R], the token that each row stands behind; of a request's first row it is no draft.
        starts: [B + 1], the first row of each request.
        most: drafts of a request, at most.

    Returns the tokens drawn [B, 1 + most], and how many of them each request gets, [B] int32.
    """
    columns = torch.arange(1 + most, device=drawn.device)
    rows = starts[:-1, None].long() + columns
    inside = rows < starts[1:, None]
    rows = rows.clamp(max=len(drawn) - 1)
    tokens = drawn[rows]
    right = inside[:, 1:] & (tokens[:, :-1] == drafts[rows[:, 1:]])
    return tokens, 1 + right.cumprod(1).sum(1).to(torch.int32)


@dataclass(frozen=True, slots=True)
class CopiedDrafts:
    """Drafts of one iteration, on their way to the host."""

    req_ids: list[str]
    tokens: Any
    """[B, drafts] array, once ``copied`` has come."""
    copied: Any
    """Event of the device."""

    def read(self) -> dict[str, list[int]]:
        """Drafts by request, of all requests of the batch; waits for the copy."""
        # wait: none, of the device: the publisher has waited for the pass; the copy
        self.copied.synchronize()
        drafts = [[token for token in row if token != NO_DRAFT] for row in self.tokens.tolist()]
        return dict(zip(self.req_ids, drafts, strict=True))


class DraftCopies(DraftTokensHandler):
    """Copier of drafts to the host, in the place of vLLM's, which keeps those of one iteration, and only
    where a grammar is to check them."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._last: CopiedDrafts | None = None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Begin to copy the drafts [B, drafts] of ``input_batch``."""
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.copy_stream):
            tokens = async_copy_to_np(draft_tokens)
            # Freed by the launching thread, it may be reused before the copy has read it.
            draft_tokens.record_stream(self.copy_stream)
            copied.record()
        self._last = CopiedDrafts(input_batch.req_ids, tokens, copied)

    def take(self) -> CopiedDrafts | None:
        """The drafts of the iteration that was launched last; None: there are none, or they are taken."""
        last = self._last
        self._last = None
        return last
