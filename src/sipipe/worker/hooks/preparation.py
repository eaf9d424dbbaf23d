"""Preparation of a stage's inputs on vLLM's second runner, and stand-ins for parts of the runner.

:class:`SiPipePrepares` stands in the place of the runner's own preparation: the preparing thread
writes a set of input buffers from the scheduling output (:mod:`sipipe.worker.inputs.prepare`), and
the runner's ``execute_model``, in the device thread, finds them where it would have prepared them.
All else of ``execute_model`` is vLLM's: its request states, LoRA, encoders, M-RoPE positions,
recurrent states, attention metadata, graphs. :class:`VllmPrepares` leaves the runner as it is, for
the few models and options whose preparation needs what only the runner has.

Of vLLM's request states these rot where SiPipe prepares, and nothing here reads them: the tokens
behind a prompt, the last sampled token, lengths, its mirrors of computed tokens on the host.

vLLM's ``PPHandler`` broadcasts sampled tokens from the last stage to the others, by a collective
across stages. SiPipe's stages share no process group, and the scheduler brings the tokens with the
scheduling output: :class:`TokenFeedback` takes them from there. ``Sampler`` keeps state for the
parameters of each request, a count of every token of the vocabulary among it; where samplers draw
on CPUs, :class:`StandInSampler` keeps nothing.

Who runs here: the preparing thread in ``prepare``; the device thread in ``begin`` and the rest.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace, get_uniform_decode_token_count

from sipipe.worker.device import Device
from sipipe.worker.inputs.buffers import InputBuffers
from sipipe.worker.inputs.kernels import Int32
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.placement import Placed, Placement, placement_of
from sipipe.worker.inputs.prepare import InputPreparer

Tokens = Callable[[ModelInput], Int32]
"""Function that waits for the input tokens of a planned iteration, in the order of its requests."""
KNOWN_STATES = (DefaultModelState, MambaHybridModelState)
"""vLLM's model states that read of a batch what is prepared here."""


def why_vllm_prepares(runner: Any) -> str:
    """The reason why the runner prepares its inputs itself; empty where SiPipe does."""
    state = type(runner.model_state)
    if state not in KNOWN_STATES:
        return f"the model brings its own inputs ({state.__name__})"
    if runner.model_config.enable_prompt_embeds:
        return "prompts come as embeddings"
    if runner.num_speculative_steps or runner.model_state.num_new_sampled_tokens_per_step != 1:
        return "several tokens are drawn at once"
    if runner.cache_config.mamba_cache_mode == "align":
        return "recurrent states are cached with prefixes"
    if runner.pcp_manager is not None or runner.dcp_size > 1:
        return "contexts are split over ranks"
    if runner.fast_prefill is not None or runner.model_config.rswa_window is not None:
        return "the model's prefill leaves tokens out"
    return ""


class VllmPrepares:
    """Preparation by the runner, in the device thread; :class:`TokenFeedback` brings its tokens.

    Args:
        tokens: Waits for the input tokens of an iteration that awaits them, and returns them.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def prepare(self, inputs: ModelInput) -> None:
        """Prepare all of an iteration that can be prepared ahead. Called by the preparing thread."""
        inputs.num_reqs = len(inputs.output.num_scheduled_tokens)
        inputs.num_tokens = inputs.output.total_num_scheduled_tokens

    def begin(self, inputs: ModelInput) -> None:
        """Complete an iteration that the runner's ``execute_model`` gets next. Called by the device
        thread."""
        if inputs.awaits:
            tokens = self._tokens(inputs).tolist()
            inputs.output.scheduled_cached_reqs.new_token_ids = [[token] for token in tokens]


class SiPipePrepares(VllmPrepares):
    """Preparation by SiPipe, in the place of the runner's from now on.

    Args:
        tokens: Waits for the input tokens of an iteration that awaits them, and returns them.
        runner: vLLM's, warmed up and without a request.
        slots: Microbatches in flight.
        sets: Sets of input buffers.
        logits: Rows of logits of a batch, at most.
        following: As :class:`.InputPreparer` has it.
        decode_tokens: As :class:`.InputPreparer` has it.
    """

    def __init__(
        self,
        tokens: Tokens,
        runner: Any,
        device: Device,
        *,
        slots: int,
        sets: int,
        logits: int,
        following: bool = False,
        decode_tokens: int = 1,
    ) -> None:
        super().__init__(tokens)
        self._runner = runner
        self._placement: Placement = placement_of(runner, device, sets, logits)
        self._buffers = self._placement.buffers
        self._preparer = InputPreparer(
            runner,
            self._buffers,
            groups=self._placement.groups,
            slots=slots,
            following=following,
            decode_tokens=decode_tokens,
        )
        requests = int(runner.max_num_reqs)
        self._no_drafts = torch.zeros(requests, dtype=torch.int32, device=runner.device)
        # Rows of logits before each request, where each has one: [B + 1], also on the device.
        self._row_each = np.arange(requests + 1, dtype=np.int32)
        self._row_each_there = torch.from_numpy(self._row_each).to(runner.device)
        self._inputs = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        self._stand_in(runner)

    def _stand_in(self, runner: Any) -> None:
        """Stand in the place of the runner's preparation, in the order of its calls."""
        self._gather_dummy = runner.gather_batch_req_state
        runner.update_pp_decode_requests = self._nothing
        runner.update_requests = self._update_requests
        runner.gather_batch_req_state = self._gather_batch_req_state
        runner.prepare_inputs = self._prepare_inputs
        runner.prepare_attn = self._placement.tables
        # The last of vLLM's calls before anything looks at tokens.
        self._metadata = runner.model_state.prepare_attn
        runner.model_state.prepare_attn = self._prepare_metadata
        runner.postprocess_num_computed_tokens = self._nothing
        if runner.lora_config is not None:
            self._make_lora_inputs = runner.lora_state.make_lora_inputs
            runner.lora_state.make_lora_inputs = self._lora_inputs
        runner.postprocess_sampled = self._postprocess_sampled

    @property
    def buffers(self) -> list[InputBuffers]:
        """The sets of input buffers."""
        return self._buffers

    def prepare(self, inputs: ModelInput) -> None:
        """Write a set of input buffers, and vLLM's records of the batch as far as they can be known."""
        self._placement.wait_free(inputs.buffer_set)
        self._preparer.prepare(inputs)
        if inputs.num_tokens:
            inputs.state = self._state(inputs)
            placed = self._placement.ahead(inputs)
            if placed:
                inputs.batch = self._batch(inputs, placed)

    def begin(self, inputs: ModelInput) -> None:
        """Note the iteration that the runner's ``execute_model`` gets next."""
        self._inputs = inputs

    # ---- in the runner's place, in the order of its calls ----------------------------------------

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: drawn tokens come with the scheduling output, and computed tokens too."""

    def _update_requests(self, output: SchedulerOutput) -> None:
        """Stand in the place of the runner's ``update_requests``: block tables and lengths are prepared."""
        runner = self._runner
        rows = runner.req_states.req_id_to_index
        for new, row in zip(output.scheduled_new_reqs, self._inputs.new_rows, strict=True):
            # vLLM's parts are kept by its row: LoRA, positions, recurrent states. Both free and give
            # rows in the order of the same scheduling outputs (tests/worker/test_prepare.py).
            assert rows[new.req_id] == row, (
                f"request {new.req_id} has row {row} here and {rows[new.req_id]} in vLLM's runner"
            )
        self._placement.begin(self._inputs)
        # As in vLLM's: all else of it would write what is prepared.
        if output.new_block_ids_to_zero:
            runner.kv_block_zeroer.zero_block_ids(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            blocks = runner.kv_cache_config.num_blocks
            copy_kv_cache_blocks_inplace(runner.kv_caches, blocks, output.kv_cache_block_copies)

    def _gather_batch_req_state(
        self, output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        """The prepared state of the batch, and its tokens a request if all decode as many."""
        if dummy_run:
            dummy: tuple[BatchReqState | None, int | None] = self._gather_dummy(output, True)
            return dummy
        inputs = self._inputs
        uniform: int | None = get_uniform_decode_token_count(
            inputs.num_reqs, inputs.num_tokens, inputs.max_query_len, inputs.decode_graph_eligible
        )
        return inputs.state, uniform

    def _lora_inputs(self, req_ids: list[str], rows: Any, num_scheduled_tokens: Any) -> Any:
        """vLLM's LoRA inputs, with the adapter of each row of logits in the place of each request's:
        a request with drafts has several."""
        _, *of_requests = self._make_lora_inputs(req_ids, rows, num_scheduled_tokens)
        first = self._buffers[self._inputs.buffer_set].first_logits.np[: len(req_ids) + 1]
        of_rows = self._runner.lora_state.lora_ids[rows].repeat(np.diff(first))
        return tuple(of_rows), *of_requests

    def _prepare_inputs(self, _output: Any, _state: Any, batch_desc: Any, *_: Any) -> InputBatch:
        """The prepared batch, padded as ``batch_desc`` wants it: to the size of a CUDA graph."""
        inputs = self._inputs
        requests = batch_desc.num_reqs or inputs.num_reqs
        tokens = max(inputs.num_tokens, batch_desc.num_tokens)
        padded = (requests, tokens) != (inputs.num_reqs, inputs.num_tokens)
        batch: InputBatch | None = inputs.batch
        if batch is None or padded:
            batch = self._batch(inputs, self._placement.place(inputs, requests, tokens))
        return batch

    def _prepare_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's attention metadata; behind it, the tokens that a planned iteration awaits."""
        metadata = self._metadata(*args, **kwargs)
        if self._inputs.awaits:
            self._placement.take(self._inputs, self._tokens(self._inputs))
        return metadata

    # ---- vLLM's records of a batch ---------------------------------------------------------------

    def _state(self, inputs: ModelInput) -> BatchReqState:
        """vLLM's state of a batch's requests, from the prepared buffers."""
        source = self._buffers[inputs.buffer_set]
        count = inputs.num_reqs
        as_decode = source.runs_as_decode.np[:count]
        return BatchReqState(
            req_ids=inputs.req_ids,
            num_scheduled_tokens=source.num_scheduled_tokens.np[:count],
            num_tokens=inputs.num_tokens,
            num_draft_tokens_np=None,
            idx_mapping_np=source.rows.np[:count],
            prefill_len_np=source.prefill_lens.np[:count],
            num_computed_prefill_tokens_np=source.num_computed_prefill_tokens.np[:count],
            is_prefilling_np=source.is_prefilling.np[:count],
            has_prefill=inputs.has_prefill,
            prefill_runs_as_decode_np=as_decode if inputs.has_prefill else None,
            decode_graph_eligible=inputs.decode_graph_eligible,
            max_seq_len_np=None,  # only vLLM's broadcast of tokens looks
        )

    def _batch(self, inputs: ModelInput, placed: Placed) -> InputBatch:
        """vLLM's batch, of the prepared buffers where they are ``placed`` on the device."""
        source = self._buffers[inputs.buffer_set]
        count = inputs.num_reqs
        state = inputs.state
        padded_requests = len(placed.seq_lens)
        return InputBatch(
            req_ids=inputs.req_ids,
            num_reqs=count,
            num_reqs_after_padding=padded_requests,
            idx_mapping=placed.rows,
            idx_mapping_np=state.idx_mapping_np,
            expanded_idx_mapping=placed.rows,
            expanded_local_pos=self._no_drafts[:count],
            num_scheduled_tokens=state.num_scheduled_tokens,
            num_tokens=inputs.num_tokens,
            num_tokens_after_padding=len(placed.input_ids),
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=placed.query_start_loc,
            query_start_loc_np=source.starts.np[: padded_requests + 1],
            seq_lens=placed.seq_lens,
            seq_lens_cpu_upper_bound=source.lengths.tensor[:padded_requests],
            dcp_local_seq_lens=None,
            num_computed_tokens_np=source.num_computed_tokens.np[:count],
            prefill_len_np=state.prefill_len_np,
            num_computed_prefill_tokens_np=state.num_computed_prefill_tokens_np,
            is_prefilling_np=state.is_prefilling_np,
            has_prefill=inputs.has_prefill,
            decode_graph_eligible=inputs.decode_graph_eligible,
            prefill_runs_as_decode_np=state.prefill_runs_as_decode_np,
            input_ids=placed.input_ids,
            positions=placed.positions,
            is_padding=placed.is_padding,
            logits_indices=placed.logits_indices,
            # Drafts are ours: parts of the runner that count rows of logits see one a request.
            cu_num_logits=self._row_each_there[: count + 1],
            cu_num_logits_np=self._row_each[: count + 1],
            has_structured_output_reqs=inputs.output.has_structured_output_requests,
            prompt_lens=None,
        )

    def _postprocess_sampled(
        self, idx_mapping: torch.Tensor, _: Any, num_sampled: torch.Tensor, *__: Any, **___: Any
    ) -> None:
        """Update what the model keeps of each request, as vLLM's last stage does here."""
        computed = self._runner.req_states.num_computed_tokens.gpu
        self._runner.model_state.postprocess_state(idx_mapping, num_sampled, computed)


class TokenFeedback:
    """Handler of tokens in the place of vLLM's ``PPHandler``, in a worker of any stage.

    The first stage embeds the last token of each decoding request, and some models look at tokens on
    others too. vLLM's own ``postprocess_sampled`` writes them into the request states. Asked only where
    vLLM prepares its inputs itself (:class:`VllmPrepares`).
    """

    def __init__(self, max_num_reqs: int, _steps: int = 0, device: Any = "cpu", **_: Any) -> None:
        self.output: SchedulerOutput | None = None
        """The scheduling output that is about to run; its worker sets it."""
        self.states: Any = None
        """vLLM's request states; None where tokens are not needed or are known already."""
        self.relayed: tuple[str, ...] = ()
        """Names of hidden states of earlier stages that this one hands on."""
        self._device = device
        self._ones = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def get_prev_sampled_outputs(self, *_: Any, **__: Any) -> dict[str, torch.Tensor] | None:
        """The input token of each request that decodes in this scheduling output, by the names of
        ``postprocess_sampled``'s arguments; None: there are none."""
        if self.output is None or self.states is None:
            return None
        cached = self.output.scheduled_cached_reqs
        index = self.states.req_id_to_index
        prefill = self.states.prefill_len.np
        rows_and_tokens = [
            (index[req_id], token_ids[0])
            # A warm-up brings no tokens, and nobody looks at those that it runs on.
            for req_id, computed, token_ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=False
            )
            if computed >= prefill[index[req_id]]
        ]
        if not rows_and_tokens:
            return None
        table = np.array(rows_and_tokens, np.int64).T.copy()  # one copy to the device for both
        rows, tokens = torch_utils.async_tensor_h2d(table, device=self._device)
        return {
            "idx_mapping": rows,
            "sampled_tokens": tokens.unsqueeze(1),
            "num_sampled": self._ones[: len(rows)],
            "num_rejected": self._zeros[: len(rows)],
        }

    def receive(self, *_: Any, **__: Any) -> bool:
        """Wait for nothing, on any stage but the last; False: no request has its token yet."""
        return False

    def broadcast(self, *_: Any, **__: Any) -> None:
        """Send nothing: tokens return by way of the scheduler."""

    def broadcast_drafts(self, *_: Any, **__: Any) -> None:
        """Send nothing: drafts return by way of the scheduler."""

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Forget nothing: nothing is kept of a request."""

    def relay_aux_hidden_states(
        self, received: IntermediateTensors, result: IntermediateTensors
    ) -> IntermediateTensors:
        """Add the hidden states of earlier stages' layers that a head on the last one reads."""
        if not self.relayed:
            return result
        relayed = {key: received[key] for key in self.relayed}
        return IntermediateTensors(result.tensors | relayed)


class StandInSampler:
    """Sampler in the place of vLLM's where CPU samplers draw: it keeps nothing of a request."""

    compute_nans = False

    def __init__(self, max_num_reqs: int = 0, device: Any = "cpu", **_: Any) -> None:
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        # Read while memory is measured with a draft head, which draws by none of it.
        zeros = SimpleNamespace(gpu=torch.zeros(max_num_reqs, device=device))
        self.sampling_states = SimpleNamespace(temperature=zeros, seeds=zeros)

    def add_request(self, *_: Any) -> None:
        """Keep nothing: the samplers hear of requests from the engine."""

    def apply_staged_writes(self) -> None:
        """Copy nothing to the device: nothing is staged."""

    def __call__(self, logits: torch.Tensor, _: Any) -> None:
        """Take as much memory as ``logits`` while vLLM profiles it: logits that are being copied to the
        host are there twice."""
        torch.empty_like(logits)
