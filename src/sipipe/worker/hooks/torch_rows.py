"""vLLM's PyTorch sampler on a stage of its second runner, for CPUs without Triton.

The second runner's own sampler is made of Triton kernels, the first one's is PyTorch:
:class:`vllm.v1.sample.sampler.Sampler`, its batch, and custom logits processors of that interface.
Here they stand in the place of the runner's ``sample``, with the rows that get a token alone, so that
a seeded request draws no random numbers while its prompt is in chunks.

Who runs here: the device thread.
"""

import copy
import math
from typing import Any

import torch
from torch.nn import functional
from vllm.config.model import LogprobsMode
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.outputs import SamplerOutput as SampledTokens
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from sipipe.worker.device import Launched
from sipipe.worker.hooks.draws import WholeBatch, sampling_rows
from sipipe.worker.hooks.preparation import StandInSampler
from sipipe.worker.inputs.model_input import ModelInput

_BLOCK = 16
"""Tokens of a cache block, of which the batch here keeps a table that nobody reads."""


class RowsSampler(Sampler):
    """vLLM's PyTorch sampler, in which each request gets the log-probabilities that it asks for.

    vLLM's own gives those of named tokens (``logprob_token_ids``) to a whole batch in which one request
    names any: the others get token 0 at -inf.
    """

    def __init__(self, logprobs_mode: LogprobsMode, use_fp64_gumbel: bool) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self._most: int | None = None
        """Most likely tokens that a request of this batch asks for at most; None: none asks for any."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SampledTokens:
        self._most = sampling_metadata.max_num_logprobs
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def gather_specific_token_logprobs(
        self,
        logprobs: torch.Tensor,
        logprob_token_ids: dict[int, list[int]],
        sampled: torch.Tensor,
    ) -> LogprobsTensors | None:
        """Log-probabilities [B, 1 + n] of named tokens, and of the most likely ones in the rows of
        requests that name none. n is as many as any request asks for.

        Args:
            logprobs: [B, V].
            logprob_token_ids: Named tokens by row.
            sampled: [B], drawn tokens.
        """
        named = super().gather_specific_token_logprobs(logprobs, logprob_token_ids, sampled)
        if named is None or self._most is None:
            return named
        likely = self.gather_logprobs(logprobs, self._most, sampled)
        rows = torch.tensor(list(logprob_token_ids))
        width = max(named.logprobs.shape[1], likely.logprobs.shape[1])
        token_ids = _widened(likely.logprob_token_ids, width, 0)
        values = _widened(likely.logprobs, width, -math.inf)
        token_ids[rows] = _widened(named.logprob_token_ids, width, 0)[rows]
        values[rows] = _widened(named.logprobs, width, -math.inf)[rows]
        return LogprobsTensors(
            logprob_token_ids=token_ids,
            logprobs=values,
            selected_token_ranks=likely.selected_token_ranks,
        )


class TorchRows(WholeBatch):
    """vLLM's PyTorch sampler on the last stage, in the place of the runner's ``sample``.

    Args:
        slots: Microbatches in flight. Each has a batch of vLLM's, so that it seldom changes.
        reports: True if this rank tells the engine what was drawn.
        stall_timeout: Seconds to wait for the engine's grammar, which it makes meanwhile.
    """

    def __init__(self, runner: Any, *, slots: int, reports: bool, stall_timeout: float) -> None:
        super().__init__(reports=reports, stall_timeout=stall_timeout)
        self._runner = runner
        model = runner.model_config
        self._vocab_size: int = model.get_vocab_size()
        self._sampler = RowsSampler(model.logprobs_mode, model.use_fp64_gumbel)
        self._batches = [_batch(runner) for _ in range(slots)]
        self._states: dict[str, CachedRequestState] = {}
        self._inputs = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        runner.sampler = StandInSampler()
        runner.sample = self._sample

    def begin(self, launched: Launched) -> None:
        """Take over the requests of the iteration that is launched next."""
        super().begin(launched)
        self._inputs = launched.inputs
        self._follow(self._inputs.output)

    @torch.inference_mode()
    def _follow(self, output: SchedulerOutput) -> None:
        """Follow the scheduler: keep its requests and no others, with the tokens that it has of them."""
        for name in output.finished_req_ids:
            self._states.pop(name, None)
            self._leave(name)
        for new in output.scheduled_new_reqs:
            self._leave(new.req_id)
            before = self._states.get(new.req_id)
            generator = None
            # It was preempted, and draws on. The next turn of a session has its own seed.
            if before is not None and before.prompt_token_ids == new.prompt_token_ids:
                generator = before.generator
            self._states[new.req_id] = _state(new, generator, self._vocab_size)
        cached = output.scheduled_cached_reqs
        for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            del self._states[name].output_token_ids[count:]  # dropped: drawn again

    def _leave(self, name: str) -> None:
        """Take a request out of the batch that it is in, if any."""
        for batch in self._batches:
            batch.remove_request(name)

    def _sample(
        self, hidden: torch.Tensor, batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Stand in the place of the runner's ``sample``, and return what it returns: its output, the
        tokens of each request [B] int32, and the rejected drafts of each [B] int32."""
        count = batch.num_reqs
        tokens = torch.zeros(count, 1, dtype=torch.int64)
        sampled = torch.zeros(count, dtype=torch.int32)
        no_drafts = torch.zeros(count, dtype=torch.int32)
        logits = self._runner.model.compute_logits(hidden[batch.logits_indices])
        logprobs = None
        if self._inputs.output is not None and logits is not None:
            drawn, rows = self._draw(logits, batch, grammar_output)
            if drawn is not None:
                tokens[rows] = drawn.sampled_token_ids.long()
                sampled[rows] = 1
                logprobs = _of_all_requests(drawn.logprobs_tensors, rows, count)
        # Otherwise it is a warm-up, or a rank without logits.
        output = SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=no_drafts,
        )
        return output, sampled, no_drafts

    def _draw(
        self, logits: torch.Tensor, batch: Any, grammar_output: Any
    ) -> tuple[SampledTokens | None, torch.Tensor]:
        """Draw a token of each request that gets one, and keep it.

        Args:
            logits: [B, V], of all requests of ``batch``.

        Returns:
            The output of vLLM's sampler, None where no request gets a token; and the rows [n] int64 of
            ``batch`` that it is of.
        """
        output = self._inputs.output
        names = [batch.req_ids[row] for row in sampling_rows(output, batch)]
        microbatch = self._batches[self._inputs.slot]
        self._fill(microbatch, names)
        row_of = {name: row for row, name in enumerate(batch.req_ids)}
        rows = torch.tensor([row_of[name] for name in microbatch.req_ids], dtype=torch.int64)
        if not len(rows):
            return None, rows
        logits = logits[rows]
        if grammar_output is not None:
            apply_grammar_bitmask(output, grammar_output, microbatch, logits)
        drawn = self._sampler(logits=logits, sampling_metadata=microbatch.sampling_metadata)
        for name, [token] in zip(microbatch.req_ids, drawn.sampled_token_ids.tolist(), strict=True):
            self._states[name].output_token_ids.append(token)
        return drawn, rows

    def _fill(self, microbatch: InputBatch, names: list[str]) -> None:
        """Have vLLM's batch of a microbatch hold these requests, and no other."""
        members = set(names)
        for name in [name for name in microbatch.req_ids if name not in members]:
            microbatch.remove_request(name)
        for name in names:
            if name not in microbatch.req_id_to_index:
                self._leave(name)
                microbatch.add_request(self._states[name])
        microbatch.condense()
        microbatch.refresh_metadata()


def _batch(runner: Any) -> InputBatch:
    """An empty batch of vLLM's, as its first runner makes it."""
    config = runner.vllm_config
    processors = runner.model_config.logits_processors or ()
    return InputBatch(
        max_num_reqs=runner.max_num_reqs,
        max_model_len=runner.max_model_len,
        max_num_batched_tokens=runner.max_num_tokens,
        device=runner.device,
        vocab_size=runner.model_config.get_vocab_size(),
        block_sizes=[_BLOCK],
        max_num_blocks_per_req=[1],
        logitsprocs=build_logitsprocs(config, runner.device, PIN_MEMORY, False, processors),
        logitsprocs_need_output_token_ids=bool(processors),
        reasoning_config=config.reasoning_config,
    )


def _state(
    new: NewRequestData, generator: torch.Generator | None, vocab_size: int
) -> CachedRequestState:
    """vLLM's record of a request; ``generator``: the one that it had before it was preempted."""
    params = copy.copy(new.sampling_params)
    assert params is not None, "a pooling model has no such stage"
    # A tokenizer's end may be no token of the model's; vLLM would mask it, for min_tokens, where
    # there is no logit.
    stops = params.all_stop_token_ids
    params._all_stop_token_ids = {token for token in stops if token < vocab_size}
    if generator is None and params.seed is not None:
        generator = torch.Generator().manual_seed(params.seed)
    state = CachedRequestState(
        req_id=new.req_id,
        prompt_token_ids=new.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
        prompt_embeds=new.prompt_embeds,
        prompt_is_token_ids=new.prompt_is_token_ids,
    )
    state.output_token_ids.extend((new.prefill_token_ids or [])[state.num_prompt_tokens :])
    return state


def _widened(values: torch.Tensor, width: int, filler: float) -> torch.Tensor:
    """``values`` [B, n] with columns of ``filler`` up to ``width``."""
    return functional.pad(values, (0, width - values.shape[1]), value=filler)


def _of_all_requests(
    logprobs: LogprobsTensors | None, rows: torch.Tensor, count: int
) -> LogprobsTensors | None:
    """``logprobs`` of the requests in ``rows`` [n], among zeros of all ``count`` requests of a batch."""
    if logprobs is None:
        return None
    return LogprobsTensors(
        logprob_token_ids=_scattered(logprobs.logprob_token_ids, rows, count),
        logprobs=_scattered(logprobs.logprobs, rows, count),
        selected_token_ranks=_scattered(logprobs.selected_token_ranks, rows, count),
    )


def _scattered(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros [count, ...] with ``values`` [n, ...] in ``rows`` [n]."""
    scattered = torch.zeros(count, *values.shape[1:], dtype=values.dtype)
    scattered[rows] = values
    return scattered
