"""Calls of one pass of vLLM's second runner, and the part of SiPipe beside each of them.

``docs/hooks.md`` is written from this table (``make hooks``). ``tests/worker/hooks/test_table.py``
compares the order of the calls with vLLM's source, and looks for each function that is named here.
"""

from typing import NamedTuple


class Hook(NamedTuple):
    """One call of vLLM's, and what SiPipe puts there."""

    caller: str
    """Function of vLLM that makes the call, as ``module:Class.method``."""
    call: str
    """Function that is called, as vLLM's source writes it."""
    ours: str
    """Part of a stage worker of SiPipe that stands there."""
    why: str
    """Reason that vLLM's own does not serve."""
    where: str
    """Function of ours, as ``file:Class.method``; paths are relative to ``src/sipipe``."""


_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

HOOKS = (
    Hook(
        caller=f"{_WORKER}.init_device",
        call="init_worker_distributed_environment",
        ours="a world of this stage's ranks, and a stand-in for the pipeline group",
        why="no collective crosses stages, so a dead stage is an error and not a hung wait",
        where="worker/hooks/world.py:stage_world",
    ),
    Hook(
        caller=f"{_RUNNER}.__init__",
        call="init_speculator",
        ours="none: a draft head is loaded beside the runner",
        why="the runner has it only where vLLM's sampler draws, and vLLM's EAGLE heads name a wrong layer "
        "where there are stages",
        where="worker/hooks/draws.py:stand_ins",
    ),
    Hook(
        caller=f"{_RUNNER}.__init__",
        call="InputBuffers",
        ours="vLLM's; on GPUs the same buffers in one piece of memory, before graphs are captured",
        why="one copy of a prepared set reaches every address that the graphs know",
        where="worker/loaded_stage.py:LoadedStage.__init__",
    ),
    Hook(
        caller=f"{_RUNNER}.__init__",
        call="PPHandler",
        ours="`TokenFeedback`, which reads tokens from the scheduling output",
        why="vLLM's broadcasts tokens by a collective across stages",
        where="worker/hooks/draws.py:stand_ins",
    ),
    Hook(
        caller=f"{_WORKER}.load_model",
        call="self.model_runner.load_model",
        ours="vLLM's; behind it a start ends where a layer's CPU kernel does not take the model's dtype",
        why="with `--enforce-eager` the kernel would be called first, and assert, by a request",
        where="worker/hooks/kernel_dtypes.py:check_dtypes",
    ),
    Hook(
        caller=f"{_RUNNER}.load_model",
        call="self.speculator.load_model",
        ours="vLLM's, beside the runner: a draft head on the last stage, by a configuration of its own",
        why="samplers draw before it proposes, and no other part of the runner knows of drafts",
        where="worker/hooks/head.py:load_speculator",
    ),
    Hook(
        caller=f"{_RUNNER}.load_model",
        call="build_custom_logits_processors",
        ours="none where CPU samplers draw",
        why="samplers apply what a request asks for",
        where="worker/hooks/draws.py:stand_ins",
    ),
    Hook(
        caller=f"{_RUNNER}.load_model",
        call="Sampler",
        ours="`StandInSampler`, which keeps nothing of a request, where CPU samplers draw",
        why="vLLM's counts every token of the vocabulary for each request",
        where="worker/hooks/draws.py:stand_ins",
    ),
    Hook(
        caller=f"{_CPU_WORKER}.determine_available_memory",
        call="self._should_warm_up_model",
        ours="a pass of a few tokens, where a compiled model is in the cache, or one stage's pass that "
        "compiles its launching, too; no other then",
        why="vLLM's pass has as many tokens as a batch can, and takes seconds; it launches from Python",
        where="worker/hooks/vllm_workers.py:CPUStageWorker._should_warm_up_model",
    ),
    Hook(
        caller=f"{_RUNNER}.initialize_kv_cache",
        call="self.speculator.set_attn",
        ours="vLLM's: the runner knows the draft head meanwhile",
        why="its layers are layers of the stage's KV cache",
        where="worker/hooks/head.py:hosted",
    ),
    Hook(
        caller=f"{_RUNNER}.initialize_kv_cache",
        call="init_kv_cache",
        ours="vLLM's; on CPUs `torch.zeros` gives pages that the kernel zeroes at their first use",
        why="a start need not write the whole KV cache",
        where="worker/hooks/vllm_workers.py:_UntouchedZeros",
    ),
    Hook(
        caller=f"{_RUNNER}.initialize_kv_cache",
        call="get_kv_connector",
        ours="`ReportingKVConnector`, a subclass of vLLM's",
        why="what a connector raises is reported as blocks that were not loaded",
        where="worker/hooks/kv_connector.py:ReportingKVConnector",
    ),
    Hook(
        caller=f"{_WORKER}.execute_model",
        call="get_pp_group().irecv_tensor_dict",
        ours="hidden states from the link, received at their first use",
        why="all that needs none of them is done first",
        where="worker/hooks/world.py:PipelineStandIn.irecv_tensor_dict",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.update_pp_decode_requests",
        ours="nothing, where SiPipe prepares",
        why="drawn tokens come with the scheduling output",
        where="worker/hooks/preparation.py:SiPipePrepares._nothing",
    ),
    Hook(
        caller=f"{_RUNNER}.update_pp_decode_requests",
        call="self.pp_handler.get_prev_sampled_outputs",
        ours="where vLLM prepares: the tokens of decoding requests, from the scheduling output",
        why="no collective brings them; vLLM's own code then writes them into its request states",
        where="worker/hooks/preparation.py:TokenFeedback.get_prev_sampled_outputs",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.add_requests",
        ours="vLLM's, with the two calls of the sampler below",
        why="LoRA, positions and recurrent states stay in vLLM's rows",
        where="worker/hooks/preparation.py:StandInSampler",
    ),
    Hook(
        caller=f"{_RUNNER}.add_requests",
        call="self.sampler.add_request",
        ours="where CPU samplers draw: nothing",
        why="the engine tells the samplers of requests",
        where="worker/hooks/preparation.py:StandInSampler.add_request",
    ),
    Hook(
        caller=f"{_RUNNER}.add_requests",
        call="self.sampler.add_request",
        ours="where the device draws simple rows: a temperature and a seed, and a note of which rows "
        "are simple",
        why="the kernel that draws needs two numbers of a request, and vLLM's `Sampler` keeps many",
        where="worker/hooks/device_sampler.py:DeviceSampler.add_request",
    ),
    Hook(
        caller=f"{_RUNNER}.add_requests",
        call="self.sampler.apply_staged_writes",
        ours="where CPU samplers draw: nothing",
        why="nothing is staged",
        where="worker/hooks/preparation.py:StandInSampler.apply_staged_writes",
    ),
    Hook(
        caller=f"{_RUNNER}.add_requests",
        call="self.sampler.apply_staged_writes",
        ours="where the device draws simple rows: the copy of new requests' two numbers to the device",
        why="one copy a pass, and none without a new request",
        where="worker/hooks/device_sampler.py:DeviceSampler.apply_staged_writes",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.update_requests",
        ours="zeroes and copies KV cache blocks, and checks that vLLM's rows are ours",
        why="block tables and lengths were prepared ahead",
        where="worker/hooks/preparation.py:SiPipePrepares._update_requests",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.block_tables.apply_staged_writes",
        ours="where SiPipe prepares: on CPUs nothing, as nobody reads vLLM's tables; on GPUs vLLM's",
        why="on CPUs `prepare_attn` hands over prepared tables, to which `update_requests`, which is "
        "replaced, adds blocks",
        where="worker/hooks/preparation.py:SiPipePrepares._update_requests",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.aux_output_connector.begin_step",
        ours="vLLM's; before the pass, metadata of earlier outputs that this worker did not get",
        why="an iteration without tokens is not sent to the workers, and its metadata waits",
        where="worker/hooks/vllm_workers.py:_StageWorker.execute_model",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.gather_batch_req_state",
        ours="hands over the prepared state of the batch",
        why="another thread has written it while the device ran the iteration before",
        where="worker/hooks/preparation.py:SiPipePrepares._gather_batch_req_state",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.prepare_inputs",
        ours="hands over the prepared batch; on GPUs, behind the copy to its addresses",
        why="the same",
        where="worker/hooks/preparation.py:SiPipePrepares._prepare_inputs",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.prepare_attn",
        ours="on CPUs hands over the prepared block tables and slots; on GPUs vLLM's",
        why="the same",
        where="worker/inputs/placement.py:Placement.tables",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.lora_state.make_lora_inputs",
        ours="vLLM's, with the adapter of each row of logits",
        why="drafts bring more rows of logits than requests",
        where="worker/hooks/preparation.py:SiPipePrepares._lora_inputs",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.model_state.prepare_attn",
        ours="vLLM's; behind it, the tokens of a planned iteration are waited for",
        why="it is the last call before anything reads tokens",
        where="worker/hooks/preparation.py:SiPipePrepares._prepare_metadata",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.kv_connector.pre_forward",
        ours="vLLM's, which notes what the engine asked to load",
        why="a load that fails is reported by its blocks",
        where="worker/hooks/kv_connector.py:ReportingKVConnector.pre_forward",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.model",
        ours="vLLM's; of some models, later stages get tensors that only the first one makes",
        why="vLLM's later stages leave them unread",
        where="worker/hooks/stage_tensors.py:hand_on",
    ),
    Hook(
        caller=f"{_RUNNER}.execute_model",
        call="self.pp_handler.relay_aux_hidden_states",
        ours="adds the hidden states of earlier layers that an EAGLE-3 head reads",
        why="stages between hand them on to the last one",
        where="worker/hooks/preparation.py:TokenFeedback.relay_aux_hidden_states",
    ),
    Hook(
        caller=f"{_WORKER}.execute_model",
        call="get_pp_group().isend_tensor_dict",
        ours="hands hidden states to the link",
        why="a stage is a world of its own",
        where="worker/hooks/world.py:PipelineStandIn.isend_tensor_dict",
    ),
    Hook(
        caller=f"{_WORKER}.sample_tokens",
        call="self.model_runner.sample_tokens",
        ours="where CPU samplers draw: logits for them, `postprocess_sampled` and the connector's report; "
        "vLLM's own only where the engine waits for this stage's report",
        why="vLLM's makes an output: a stream's wait, two copies and an event that nobody needs",
        where="worker/hooks/draws.py:LastRows._sample_tokens",
    ),
    Hook(
        caller=f"{_WORKER}.sample_tokens",
        call="self.model_runner.sample_tokens",
        ours="where vLLM's sampler draws: vLLM's; before it the engine's grammar is waited for, if a "
        "request has one",
        why="the engine makes the bitmask while the stage runs the pass",
        where="worker/hooks/draws.py:WholeBatch.finish",
    ),
    Hook(
        caller=f"{_WORKER}.sample_tokens",
        call="self.model_runner.sample_tokens",
        ours="on every stage of a pooling model: it is not called; the stream waits until the result of "
        "`execute_model` is copied",
        why="the next pass may write what is being copied",
        where="worker/hooks/draws.py:Pooled.finish",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.pp_handler.receive",
        ours="nothing, on every stage but the last",
        why="tokens come with the scheduling output",
        where="worker/hooks/preparation.py:TokenFeedback.receive",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.postprocess_num_computed_tokens",
        ours="nothing, on every stage but the last",
        why="computed tokens come with the scheduling output",
        where="worker/hooks/preparation.py:SiPipePrepares._nothing",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.sample",
        ours="where CPU samplers draw: logits of the rows that sample, in the samplers' order; on CPUs "
        "`torch.empty` gives the projection its place in BIC-L",
        why="CPU samplers draw; fresh memory for each projection costs a copy and page faults",
        where="worker/hooks/draws.py:LastRows._sample",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.sample",
        ours="where vLLM's sampler draws, on CPUs without Triton: the PyTorch sampler of vLLM's first "
        "runner, with a batch of its own for each microbatch",
        why="the second runner's sampler is made of Triton kernels; custom logits processors have the "
        "first one's interface",
        where="worker/hooks/torch_rows.py:TorchRows._sample",
    ),
    Hook(
        caller=f"{_RUNNER}.sample",
        call="self.rejection_sampler",
        ours="where vLLM's sampler draws beside a draft head: `StrictVerifier`, which has that sampler draw "
        "each row",
        why="tokens are those without drafts, seed for seed",
        where="worker/hooks/drafting_batch.py:StrictVerifier.__call__",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.pp_handler.broadcast",
        ours="nothing",
        why="tokens return by way of the scheduler",
        where="worker/hooks/preparation.py:TokenFeedback.broadcast",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.prompt_logprobs_worker.compute_prompt_logprobs",
        ours="vLLM's; with `--enable-lora` its layers are told the adapter of each row of the prompts",
        why="vLLM has told them those of the rows that sample, whose number is another",
        where="worker/hooks/prompt_adapters.py:score_prompts_by_adapters",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.postprocess_sampled",
        ours="updates what the model keeps of a request; leaves tokens and lengths alone",
        why="the scheduling output brings them",
        where="worker/hooks/preparation.py:SiPipePrepares._postprocess_sampled",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.speculator.propose",
        ours="where CPU samplers draw: nothing; called when the engine says what they have drawn, between "
        "two iterations",
        why="the tokens that drafts stand behind are drawn on other cores",
        where="worker/drafter.py:Drafter.propose",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.draft_tokens_handler.set_draft_tokens",
        ours="where vLLM's sampler draws beside a draft head: the copy of its drafts to the host",
        why="the engine schedules them; vLLM's copies them only for a grammar, and keeps those of one pass",
        where="worker/hooks/drafting_batch.py:DraftCopies.set_draft_tokens",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.pp_handler.broadcast_drafts",
        ours="nothing",
        why="drafts return by way of the scheduler",
        where="worker/hooks/preparation.py:TokenFeedback.broadcast_drafts",
    ),
    Hook(
        caller=f"{_RUNNER}.sample_tokens",
        call="self.kv_connector.post_forward",
        ours="vLLM's, with the loads that failed",
        why="the scheduler has a policy for blocks that were not loaded",
        where="worker/hooks/kv_connector.py:ReportingKVConnector.post_forward",
    ),
)
"""Hooks in the order in which vLLM makes the calls of one load and one pass."""
