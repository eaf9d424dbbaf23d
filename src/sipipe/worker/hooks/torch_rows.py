"""vLLM's PyTorch sampler on a stage of its second runner, for CPUs without Triton.

The second runner's own sampler is made of Triton kernels, the first one's is PyTorch:
:class:`vllm.v1.sample.sampler.Sampler`, its batch, and custom logits processors of that interface.
Here they stand in the place of the runner's ``sample``, with the rows that get a token alone, so that
a seeded request draws no random numbers while its prompt is in chunks.

Who runs here: the device thread.
"""

from typing import Any

import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import build_logitsprocs
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


class TorchRows(WholeBatch):
    """On the last stage, in the place of the runner's ``sample``. Each of ``slots`` microbatches has
    a batch of vLLM's, so that it seldom changes."""

    def __init__(self, runner: Any, *, slots: int, reports: bool, stall_timeout: float) -> None:
        super().__init__(reports=reports, stall_timeout=stall_timeout)
        self._runner = runner
        self._sampler = Sampler(runner.model_config.logprobs_mode)
        self._batches = [_batch(runner) for _ in range(slots)]
        self._states: dict[str, CachedRequestState] = {}
        self._inputs = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        runner.sampler, runner.sample = StandInSampler(), self._sample

    def begin(self, launched: Launched) -> None:
        super().begin(launched)
        self._inputs = launched.inputs
        self._follow(self._inputs.output)

    @torch.inference_mode()
    def _follow(self, output: SchedulerOutput) -> None:
        """The requests are those that the scheduler has, with its tokens."""
        for name in output.finished_req_ids:
            self._states.pop(name, None)
            self._leave(name)
        for new in output.scheduled_new_reqs:
            self._leave(new.req_id)
            before = self._states.get(new.req_id)  # it was preempted
            self._states[new.req_id] = _state(new, before.generator if before else None)
        cached = output.scheduled_cached_reqs
        for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            del self._states[name].output_token_ids[count:]  # dropped: drawn again

    def _leave(self, name: str) -> None:
        """The request is in no batch."""
        for batch in self._batches:
            batch.remove_request(name)

    def _sample(
        self, hidden: torch.Tensor, batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """In place of the runner's ``sample``, with its form of the result."""
        count, output = batch.num_reqs, self._inputs.output
        tokens = torch.zeros(count, 1, dtype=torch.int64)
        sampled, none = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        logits = self._runner.model.compute_logits(hidden[batch.logits_indices])
        logprobs = None
        if output is not None and logits is not None:  # else a warm-up, or a rank without logits
            names = [batch.req_ids[row] for row in sampling_rows(output, batch)]
            held = self._batches[self._inputs.slot]
            self._hold(held, names)
            place = {name: row for row, name in enumerate(batch.req_ids)}
            rows = torch.tensor([place[name] for name in held.req_ids], dtype=torch.int64)
            if len(rows):
                logits = logits[rows]
                if grammar_output is not None:
                    apply_grammar_bitmask(output, grammar_output, held, logits)
                drawn = self._sampler(logits=logits, sampling_metadata=held.sampling_metadata)
                tokens[rows], sampled[rows] = drawn.sampled_token_ids.long(), 1
                own = drawn.sampled_token_ids.tolist()
                for name, [token] in zip(held.req_ids, own, strict=True):
                    self._states[name].output_token_ids.append(token)
                logprobs = _of_all(drawn.logprobs_tensors, rows, count)
        counts: dict[str, Any] = {"num_nans": None, "num_sampled": sampled, "num_rejected": none}
        found = SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs, **counts)
        return found, sampled, none

    def _hold(self, held: InputBatch, names: list[str]) -> None:
        """Have vLLM's batch of a microbatch hold these requests, and no other."""
        wanted = set(names)
        for name in [name for name in held.req_ids if name not in wanted]:
            held.remove_request(name)
        for name in names:
            if name not in held.req_id_to_index:
                self._leave(name)
                held.add_request(self._states[name])
        held.condense()
        held.refresh_metadata()


def _batch(runner: Any) -> InputBatch:
    config, processors = runner.vllm_config, runner.model_config.logits_processors or ()
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


def _state(new: NewRequestData, generator: torch.Generator | None) -> CachedRequestState:
    params, prompt = new.sampling_params, new.prompt_token_ids
    assert params is not None, "a pooling model has no such stage"
    if generator is None and params.seed is not None:
        generator = torch.Generator().manual_seed(params.seed)
    state = CachedRequestState(
        req_id=new.req_id,
        prompt_token_ids=prompt,
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


def _of_all(
    found: LogprobsTensors | None, rows: torch.Tensor, count: int
) -> LogprobsTensors | None:
    """[count, k + 1]: of every request of the batch; of ``rows`` what was ``found``."""
    if found is None:
        return None
    whole = [torch.zeros(count, *part.shape[1:], dtype=part.dtype) for part in found[:3]]
    for into, part in zip(whole, found[:3], strict=True):
        into[rows] = part
    return LogprobsTensors(*whole)
