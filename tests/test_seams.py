"""Everything of vLLM that SiPipe stands on, by name: what is missing or changed here says why
nothing else works with another version.

Three kinds: names that are imported (found in our source), methods that are overridden or called
(with the parameters that we rely on), attributes that are read or set.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")


SOURCE = Path(__file__).parents[1] / "src" / "sipipe"


def rows(table: str) -> list[str]:
    """But for comments; an indented line goes on with the one before."""
    lines = table.replace("\n    ", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def methods(table: str) -> dict[str, str | None]:
    parts = (row.partition("(") for row in rows(table))
    return {place: names[:-1].replace(",", "") if opens else None for place, opens, names in parts}


def attributes(table: str) -> dict[str, str]:
    return dict(row.split(": ") for row in rows(table))


METHODS = methods("""
# The detokenizer, whose stream is begun behind a prompt's last whole character.
vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.__init__(self, tokenizer, request)
vllm.v1.engine.detokenizer:FastIncrementalDetokenizer._protected_step(self, next_token_id)
# The executor: what EngineCore calls, and what we call of the base class.
vllm.v1.executor.abstract:Executor._init_executor(self)
vllm.v1.executor.abstract:Executor.collective_rpc(self, method, timeout, args, kwargs, non_block)
vllm.v1.executor.abstract:Executor.execute_model(self, scheduler_output, non_block)
vllm.v1.executor.abstract:Executor.sample_tokens(self, grammar_output, non_block)
vllm.v1.executor.abstract:Executor.compile_or_warm_up_model(self)
vllm.v1.executor.abstract:Executor.initialize_from_config(self, kv_cache_configs)
vllm.v1.executor.abstract:Executor.init_kv_output_aggregator(self, connector)
# The self-test: an engine core of stock vLLM's in a process of its own, a scheduler beside the stages.
vllm.v1.engine.core:EngineCore.__init__(self, vllm_config, executor_class, log_stats)
vllm.v1.engine.core:EngineCore.add_request(self, request)
vllm.v1.engine.core:EngineCore.step(self)
vllm.v1.engine.core:EngineCore.shutdown(self)
vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config(kv_cache_configs)
vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
vllm.v1.core.sched.scheduler:Scheduler.__init__(self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size)
vllm.v1.core.sched.scheduler:Scheduler.shutdown(self)
vllm.v1.request:Request.__init__(self, request_id, prompt_token_ids, sampling_params, pooling_params)
vllm.v1.structured_output:StructuredOutputManager.__init__(self, vllm_config)
vllm.tokenizers:cached_tokenizer_from_config(model_config)
vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate(self, outputs, output_rank)
vllm.v1.outputs:ModelRunnerOutput.with_kv_conn_output_only(kv_connector_output)
vllm.v1.worker.gpu.kv_connector:KVConnector.post_forward(self, finished_req_ids)
vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward(self, scheduler_output, input_batch, attn_metadata)
vllm.v1.worker.gpu.kv_connector:ActiveKVConnector._start_load_kv(self)
vllm.v1.worker.gpu.kv_connector:get_kv_connector(vllm_config, kv_caches_dict)
vllm.v1.core.sched.scheduler:Scheduler._handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens)
vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving(self, failed_req_ids)
vllm.v1.core.sched.scheduler:Scheduler._connector_finished(self, request)
vllm.v1.core.sched.scheduler:Scheduler._preempt_request(self, request, timestamp, drop_stale_output)
vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(self, block_ids)
vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids(self, request_id)
# SiPipe's KV connector, and what stands in for some methods of any.
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens(self, request, num_computed_tokens)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_state_after_alloc(self, request, blocks, num_external_tokens)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta(self, scheduler_output)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.request_finished(self, request, block_ids)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_kv_cache_manager(self, kv_cache_manager)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_kv_caches(self, kv_caches)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.start_load_kv(self, forward_context)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_layer_load(self, layer_name)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.save_kv_layer(self, layer_name, kv_layer, attn_metadata)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_save(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_finished(self, finished_req_ids)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_transfer_results(self, finished_req_ids)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_block_ids_with_load_errors(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions(self, kv_connector_metadata)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.clear_connector_metadata(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.finish_forward(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_kv_connector_stats(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_kv_connector_kv_cache_events(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request(self, request)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_loaded_kv_cache_group_ids(self, request)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_external_cache_hit_sources(self, request, num_external_tokens)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_finished_partial_tail(self, request, block_ids, partial_tail_offloads)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_connector_output(self, connector_output)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_block_frees(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_push_work(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.take_events(self)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache(self)
vllm.v1.worker.gpu_input_batch:InputBatch.add_request(self, request)
vllm.v1.sample.sampler:Sampler.__init__(self, logprobs_mode, use_fp64_gumbel)
vllm.v1.sample.sampler:Sampler.forward(self, logits, sampling_metadata)
vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs(self, logprobs, logprob_token_ids, sampled)
vllm.v1.sample.sampler:Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens(self, request_id, tokens)
vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask(self, bitmask, batch_index)
vllm.v1.structured_output.backend_types:StructuredOutputGrammar.rollback(self, num_tokens)
vllm.v1.structured_output.backend_types:StructuredOutputGrammar.is_terminated(self)
vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask(self, max_num_seqs)
vllm.v1.structured_output:StructuredOutputManager._create_grammar(self, request)
vllm.v1.structured_output:StructuredOutputManager.clear_backend(self)
vllm.v1.structured_output.utils:apply_grammar_bitmask(scheduler_output, grammar_output, input_batch, logits)
vllm.v1.sample.logits_processor:build_logitsprocs(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
vllm.v1.executor.abstract:Executor.take_draft_token_ids(self)
vllm.v1.executor.abstract:Executor.check_health(self)
vllm.v1.executor.abstract:Executor.register_failure_callback(self, callback)
vllm.v1.executor.abstract:Executor.shutdown(self)
vllm.v1.executor.abstract:Executor.supports_async_scheduling()
vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args(args)
vllm.engine.arg_utils:EngineArgs.create_engine_config(self, usage_context)
vllm.engine.arg_utils:EngineArgs.__post_init__(self)
vllm.config:VllmConfig.max_concurrent_batches
vllm.config:VllmConfig._validate_v2_model_runner(self)
vllm.config:VllmConfig._get_v2_model_runner_unsupported_features(self)
vllm.model_executor.model_loader:get_model_loader(load_config)
vllm.tokenizers.registry:_TokenizerRegistry.load_tokenizer_cls(self, tokenizer_mode)
# The benchmark client.
vllm.benchmarks.serve:add_cli_args(parser)
vllm.benchmarks.serve:main_async(args)
# Scheduling.
vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)
vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output)
vllm.v1.core.sched.scheduler:Scheduler.has_requests(self)
# It counts tokens that are still to come.
vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule(self, scheduler_output)
vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids(self, draft_token_ids)
vllm.sampling_params:SamplingParams._validate_spec_decode(self, speculative_config)
vllm.config:SpeculativeConfig.uses_dynamic_speculative_decoding(self)
vllm.v1.core.sched.scheduler:Scheduler.get_request_counts(self)
vllm.v1.core.sched.scheduler:Scheduler.add_request(self, request)
vllm.v1.core.sched.scheduler:Scheduler.get_num_unfinished_requests(self)
vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request(self, request)
# Streaming sessions.
vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session(self, session, update)
vllm.v1.core.sched.scheduler:Scheduler._enqueue_waiting_request(self, request)
vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache(self, reset_running_requests, reset_connector)
vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed(self, request)
vllm.v1.core.sched.request_queue:RequestQueue.remove_requests(self, requests)
vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request(self, request_id, input_stream, sampling_params)
vllm.v1.engine.output_processor:RequestOutputCollector.put(self, output)
vllm.v1.engine.output_processor:RequestOutputCollector.close(self)
# What front ends are given.
vllm.v1.engine.async_llm:AsyncLLM.add_request(self, request_id, prompt, params)
vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks(self)
vllm.v1.engine.llm_engine:LLMEngine.add_request(self, request_id, prompt, params)
vllm.v1.engine.llm_engine:LLMEngine.get_supported_tasks(self)
vllm.v1.engine.input_processor:InputProcessor._validate_params(self, params, supported_tasks)
vllm.v1.engine.input_processor:InputProcessor._validate_lora(self, lora_request)
vllm.v1.engine.input_processor:InputProcessor._validate_prompt_len(self, prompt_len, prompt_type)
vllm.v1.engine.input_processor:InputProcessor._validate_model_input(self, prompt_input, prompt_type)
vllm.model_executor.layers.vocab_parallel_embedding:pad_vocab_size(vocab_size, pad_to)
vllm.renderers.base:BaseRenderer.validate_token_ids(self, token_ids)
# What a client is told of a request that fails, and what its seed comes from.
vllm.v1.engine.async_llm:AsyncLLM.generate
vllm.v1.engine.async_llm:AsyncLLM.shutdown(self, timeout)
vllm.v1.engine.output_processor:OutputProcessor.propagate_error(self, e)
vllm.v1.engine.core_client:MPClient._format_exception(self, e)
vllm.v1.engine.core_client:AsyncMPClient._ensure_output_queue_task(self)
vllm.v1.engine.core_client:SyncMPClient.__init__(self)
vllm.v1.engine.output_processor:OutputProcessor.process_outputs(self, engine_core_outputs)
vllm.v1.engine.output_processor:OutputProcessor.abort_requests(self, request_ids, internal)
# An engine that is told to end while it is paused.
vllm.v1.engine.core:EngineCoreProc._handle_shutdown(self)
vllm.v1.engine.core:EngineCoreProc._handle_client_request(self, request_type, request)
vllm.v1.engine.core:EngineCore._process_aborts_queue(self)
vllm.v1.engine.core:EngineCoreProc.is_scheduler_paused(self)
vllm.v1.engine.core:EngineCoreProc._send_abort_outputs(self, aborted_reqs)
vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(self, pause_state)
vllm.v1.core.sched.scheduler:Scheduler.finish_requests(self, request_ids, finished_status)
vllm.v1.utils:shutdown(procs, timeout)
vllm.v1.engine.input_processor:InputProcessor.assign_request_id(request)
vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens)
vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split(self, request, num_new_tokens)
vllm.v1.core.sched.scheduler:Scheduler._is_blocked_waiting_status(status)
# Workers.
vllm.v1.worker.worker_base:WorkerWrapperBase.__init__(self, rpc_rank, global_rank)
vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker(self, all_kwargs)
vllm.v1.worker.worker_base:WorkerWrapperBase.init_device(self)
vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model(self, scheduler_output)
vllm.v1.worker.worker_base:WorkerWrapperBase.shutdown(self)
vllm.v1.worker.cpu_worker:CPUWorker.init_device(self)
vllm.v1.worker.cpu_worker:CPUWorker.load_model(self)
vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model(self)
vllm.v1.worker.cpu.model_runner:CPUModelRunner.warming_up_model(self)
vllm.v1.worker.gpu_worker:Worker.init_device(self)
vllm.v1.worker.cpu_worker:init_worker_distributed_environment(vllm_config, rank, distributed_init_method, local_rank, backend)
vllm.v1.worker.gpu_worker:init_worker_distributed_environment(vllm_config, rank, distributed_init_method, local_rank, backend)
vllm.distributed.parallel_state:init_distributed_environment(world_size, rank, distributed_init_method, local_rank, backend)
vllm.distributed.parallel_state:ensure_model_parallel_initialized(tensor_model_parallel_size, pipeline_model_parallel_size)
vllm.distributed.parallel_state:set_custom_all_reduce(enable)
vllm.distributed.device_communicators.all_reduce_utils:gpu_p2p_access_check(src, tgt)
vllm.distributed.utils:get_pp_indices(num_hidden_layers, pp_rank, pp_size)
vllm.utils.ompmultiprocessing:OMPProcessManager(config)
vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(self, rank, local_rank)
vllm.distributed.parallel_state:GroupCoordinator.all_gather(self, input_, dim)
# The second runner, which is hosted as it is but for what we put in place of its parts.
vllm.v1.worker.gpu.model_runner:copy_kv_cache_blocks_inplace
vllm.v1.worker.gpu.model_runner:PPHandler(max_num_reqs, num_speculative_steps, device)
vllm.v1.worker.gpu.model_runner:PPHandler.get_prev_sampled_outputs(self)
vllm.v1.worker.gpu.model_runner:PPHandler.receive(self, input_batch)
vllm.v1.worker.gpu.model_runner:PPHandler.broadcast(self)
vllm.v1.worker.gpu.model_runner:PPHandler.broadcast_drafts(self)
vllm.v1.worker.gpu.model_runner:PPHandler.on_req_idx_freed(self, req_idx)
vllm.v1.worker.gpu.model_runner:PPHandler.relay_aux_hidden_states(self, intermediate_tensors, output_intermediate_tensors)
vllm.v1.worker.gpu.model_runner:Sampler.add_request(self, req_idx, sampling_params)
vllm.v1.worker.gpu.model_runner:Sampler.apply_staged_writes(self)
vllm.v1.worker.gpu.model_runner:Sampler.__call__(self, logits, input_batch)
vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample(self, hidden_states, input_batch, grammar_output)
vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run(self, num_tokens, uniform_decode)
vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens)
vllm.v1.worker.gpu.model_runner:GPUModelRunner._set_active_loras(self, prompt_lora_mapping, token_lora_mapping, lora_requests)
vllm.v1.worker.gpu.states:RequestState.add_request(self, req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens)
vllm.v1.worker.gpu.states:RequestState.apply_staged_writes(self)
vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots(self, request, num_new_tokens, num_lookahead_tokens)
vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks(self, request, num_computed_tokens)
vllm.v1.worker.gpu.states:RequestState.remove_request(self, req_id)
vllm.v1.worker.gpu.input_batch:InputBatch.make_dummy(num_reqs, num_tokens, input_buffers)
vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled(self, idx_mapping, sampled_tokens, num_sampled, num_rejected)
vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output(self)
vllm.v1.worker.gpu.sample.gumbel:gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, use_fp64)
vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.copy_to_uva(self)
vllm.v1.worker.gpu_worker:Worker.execute_model(self, scheduler_output)
vllm.v1.worker.gpu_worker:Worker.sample_tokens(self, grammar_output)
vllm.v1.worker.gpu_worker:Worker.load_model(self)
vllm.v1.worker.gpu_worker:Worker.determine_available_memory(self)
vllm.utils.torch_utils:async_tensor_h2d(data, device, dtype, out)
vllm.utils.numa_utils:get_auto_numa_nodes()
vllm.utils.cpu_resource_utils:get_memory_node_info(node_id)
vllm.utils.cpu_resource_utils:get_visible_memory_node
vllm.utils.cpu_resource_utils:get_cgroup_memory_limit()
vllm.utils.cpu_resource_utils:get_cgroup_memory_usage()
vllm.v1.executor.multiproc_executor:set_multiprocessing_worker_envs(local_world_size)
vllm.platforms.interface:Platform.visible_device_id_to_physical_device_id(device_id)
vllm.model_executor.layers.logits_processor:LogitsProcessor._gather_logits(self, logits)
# Files that torch compiles on CPUs.
torch._inductor.codecache:_worker_compile_cpp(lock_path, cpp_builders)
# Draft heads: vLLM's speculators, called on batches of ours.
vllm.v1.worker.gpu.spec_decode:init_speculator(vllm_config, device, req_states)
vllm.v1.worker.gpu.model_runner:init_speculator(vllm_config, device, req_states)
vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__(self, logits, input_batch, draft_logits, invalid_drafts)
vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len)
vllm.v1.worker.gpu.spec_decode.utils:DraftTokensHandler.set_draft_tokens(self, input_batch, draft_tokens)
vllm.v1.worker.gpu.model_runner:sort_batch_req_ids(num_tokens_per_req, draft_tokens, decode_query_len)
vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model(self, target_model)
vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator._build_attn_metadata(self, num_reqs, batch_desc, query_start_loc_np, seq_lens_cpu_upper_bound, step, slot_mappings)
vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft(self, hidden_states)
vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, num_speculative_tokens)
vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator.propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, num_speculative_tokens)
vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator.load_draft_model(self, target_model, target_attn_layer_names)
vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator._run_model(self, input_ids, positions)
vllm.v1.worker.gpu.spec_decode.eagle.utils:maybe_share_target_embed(draft_model, draft_inner, target_inner)
vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:set_eagle3_aux_hidden_state_layers(model, spec_config)
vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:verify_supports_aux_hidden_states_over_pp(model, method)
vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out)
vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(self, model_config, model)
# Ray's nodes.
vllm.ray.ray_env:get_env_vars_to_copy(exclude_vars, additional_vars, destination)
vllm.logger:configure_logging(config)
vllm.platforms.interface:Platform.device_control_id_to_physical_device_id(device_id)
""")
"""Functions and methods: parameters that we pass by name or override; none: only that it is there.

Parameters may be followed by others; an override's own signature is compared with these by mypy.
"""

ATTRIBUTES = attributes("""
vllm.v1.executor.abstract:Executor: vllm_config parallel_config scheduler_config supports_pp
vllm.v1.core.sched.scheduler:Scheduler: dynamic_sd_lookup num_spec_tokens
    structured_output_manager max_num_running_reqs grammar_compile_error_reqs running waiting
    kv_holding_waiting max_num_scheduled_tokens max_num_active_reqs kv_cache_manager lora_config
    need_mamba_block_aligned_split current_step scheduler_config cache_config is_encoder_decoder
    vllm_config needs_kv_cache_zeroing use_pp
vllm.v1.structured_output:StructuredOutputManager: executor backend tokenizer reasoner_cls
vllm.v1.core.kv_cache_manager:KVCacheManager: coordinator empty_kv_cache_blocks enable_caching
vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator: single_type_managers
vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager: _record_new_block_ids
    block_size num_cached_block block_pool
vllm.v1.request:Request: resumable streaming_queue client_index prompt_token_ids next_decode_eligible_step num_tokens_with_spec num_output_placeholders
    num_computed_tokens is_prefill_chunk spec_token_ids num_tokens lora_request status request_id
vllm.v1.core.sched.output:SchedulerOutput: scheduled_new_reqs scheduled_cached_reqs
    num_scheduled_tokens finished_req_ids total_num_scheduled_tokens
    has_structured_output_requests new_block_ids_to_zero kv_cache_block_copies preempted_req_ids
    free_encoder_mm_hashes
vllm.v1.core.sched.output:CachedRequestData: req_ids new_token_ids new_block_ids
    num_computed_tokens num_output_tokens
vllm.v1.core.sched.output:NewRequestData: req_id prompt_token_ids sampling_params block_ids
    num_computed_tokens lora_request prefill_token_ids
vllm.v1.core.sched.output:GrammarOutput: structured_output_request_ids grammar_bitmask
vllm.v1.outputs:ModelRunnerOutput: req_ids req_id_to_index sampled_token_ids logprobs
    prompt_logprobs_dict prompt_token_id_logprobs_dict kv_connector_output pooler_output
vllm.v1.engine:EngineCoreOutput: request_id finish_reason stop_reason num_nans_in_logits
vllm.outputs:CompletionOutput: finish_reason stop_reason
vllm.v1.outputs:LogprobsLists: logprob_token_ids logprobs sampled_token_ranks
vllm.v1.worker.cpu_worker:CPUWorker: model_runner scheduler_config model_config cache_config
vllm.v1.worker.gpu.model_runner:GPUModelRunner: pp_handler req_states sampler
    prompt_logprobs_worker intermediate_tensors max_num_reqs max_num_tokens lora_config
    is_first_pp_rank is_last_pp_rank device model vllm_config model_config input_buffers
    is_pooling_model kv_connector max_model_len supports_mm_inputs
# vLLM's PyTorch sampler and its batch of request states.
vllm.v1.worker.gpu_input_batch:InputBatch: req_ids req_id_to_index sampling_metadata condense
    remove_request refresh_metadata
vllm.v1.worker.gpu_input_batch:CachedRequestState: req_id prompt_token_ids mm_features
    sampling_params generator block_ids num_computed_tokens output_token_ids prompt_embeds
    prompt_is_token_ids num_prompt_tokens
vllm.v1.sample.metadata:SamplingMetadata: max_num_logprobs
vllm.v1.outputs:LogprobsTensors: logprob_token_ids logprobs selected_token_ranks
vllm.v1.worker.gpu.states:RequestState: req_id_to_index prefill_len
vllm.v1.worker.gpu.async_utils:AsyncOutput: sampled_token_ids model_runner_output
vllm.v1.worker.gpu.async_utils:AsyncPoolingOutput: copy_event
vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor: np gpu
vllm.v1.worker.gpu.input_batch:InputBatch: req_ids num_reqs num_computed_tokens_np
    num_scheduled_tokens prefill_len_np logits_indices idx_mapping_np is_prefilling_np idx_mapping
    expanded_idx_mapping positions
vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker: uses_prompt_logprobs
vllm.v1.worker.gpu.sample.output:SamplerOutput: sampled_token_ids logprobs_tensors num_nans
    num_sampled num_rejected
vllm.v1.worker.gpu_worker:Worker: use_v2_model_runner model_runner cache_config _pp_send_work
vllm.distributed.parallel_state: _PP
vllm.config:VllmConfig: quant_config model_config parallel_config scheduler_config cache_config
    additional_config lora_config speculative_config kv_transfer_config ec_transfer_config
    reasoning_config aux_output_config observability_config watermark_config use_v2_model_runner
    logging_config
vllm.config:MultiModalConfig: mm_processor_cache_type
vllm.config:ParallelConfig: pipeline_parallel_size tensor_parallel_size world_size worker_cls
    data_parallel_size data_parallel_index data_parallel_size_local data_parallel_backend
    prefill_context_parallel_size decode_context_parallel_size nnodes enable_eplb
    enable_elastic_ep numa_bind disable_custom_all_reduce distributed_timeout_seconds
    use_ubatching assigned_physical_gpu_ids placement_group ray_runtime_env
vllm.entrypoints.common.cli_args:FrontendArgs: middleware
# A server that ends: what of it the middleware asks.
vllm.v1.engine.async_llm:AsyncLLM: engine_core errored output_handler output_processor
vllm.v1.engine.core:EngineCoreProc: shutdown_state aborts_queue
vllm.v1.engine.output_processor:OutputProcessor: external_req_ids request_states
vllm.v1.engine.input_processor:InputProcessor: renderer
vllm.v1.core.sched.scheduler:Scheduler: num_waiting_for_streaming_input
vllm.v1.request:Request: streaming_queue resumable num_output_placeholders
vllm.v1.executor.abstract:Executor: is_sleeping
vllm.v1.engine.core_client:MPClient: resources utility_results
vllm.v1.engine.core_client:SyncMPClient: output_queue_thread outputs_queue
vllm.v1.engine.core_client:BackgroundResources: engine_manager output_queue_task
vllm.v1.engine.utils:CoreEngineProcManager: manager_stopped
vllm.v1.engine.utils:CoreEngineActorManager: manager_stopped
vllm.config.aux_output:AuxOutputConfig: enabled
vllm.config:SchedulerConfig: prefill_schedule_interval stream_interval
vllm.config:SpeculativeConfig: method num_speculative_tokens prompt_lookup_max prompt_lookup_min
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method
vllm.v1.worker.gpu.sample.logit_bias: MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS
    MAX_NUM_STOP_TOKEN_IDS
vllm.envs: VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_HOST_IP VLLM_RAY_BUNDLE_INDICES
    VLLM_RAY_PER_WORKER_GPUS VLLM_USE_V2_MODEL_RUNNER VLLM_CACHE_ROOT
    VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_SKIP_P2P_CHECK VLLM_FORCE_AOT_LOAD
    VLLM_USE_AOT_COMPILE VLLM_DISABLE_COMPILE_CACHE VLLM_USE_LAYERNAME
vllm.utils.torch_utils: _USE_LAYERNAME
torch._inductor.cpp_builder: CppBuilder _BUILD_TEMP_DIR
torch._inductor.cpp_builder:CppBuilder: build get_target_file_path _output _output_dir _name
torch._inductor.codecache: LOCK_TIMEOUT
vllm.platforms.interface:Platform: ray_device_key ray_noset_device_env_vars device_control_env_var
    additional_env_vars
vllm.config:ModelConfig: model dtype seed runner_type logits_processors is_multimodal_model
    is_encoder_decoder is_hybrid is_attention_free is_moe return_sampling_mask
    enable_prompt_embeds logprobs_mode use_fp64_gumbel enable_sleep_mode has_inner_state
    rswa_window hf_text_config get_vocab_size get_hidden_size get_total_num_hidden_layers
    architectures registry model_impl model_class_overrides hf_config max_logprobs
    original_max_model_len skip_tokenizer_init quantization
vllm.v1.engine:EngineCoreOutput: request_id new_token_ids new_logprobs finish_reason
vllm.v1.outputs:LogprobsLists: logprob_token_ids logprobs
vllm.sampling_params:SamplingParams: temperature top_k top_p min_p seed logprobs prompt_logprobs
    all_stop_token_ids _all_stop_token_ids
    prompt_logprob_token_ids prompt_logprob_start logit_bias bad_words allowed_token_ids min_tokens repetition_penalty
    presence_penalty frequency_penalty structured_outputs
""")


MOVED = {"vllm.entrypoints.common.cli_args": "vllm.entrypoints.launchers.cli_args"}
"""Where vLLM 0.32 has what a newer one has elsewhere and only hands us: we do not import it."""


def resolve(place: str):
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        found = importlib.import_module(MOVED[module])
    for part in filter(None, name.split(".")):
        found = inspect.getattr_static(found, part)
    return found


@pytest.mark.parametrize(("place", "parameters"), METHODS.items(), ids=METHODS)
def test_functions_have_the_parameters(place, parameters):
    found = resolve(place)
    if parameters is None:
        return
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    known = inspect.signature(found).parameters
    variadic = any(p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL for p in known.values())
    missing = set(parameters.split()) - set(known)
    assert not missing or (variadic and "self" not in missing), f"{place} takes {list(known)}"


@pytest.mark.parametrize(("place", "names"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_classes_have_the_attributes(place, names):
    found = resolve(place)
    missing = [name for name in names.split() if not has(found, name)]
    assert not missing


def has(found, name: str) -> bool:
    """Whether a class or module defines ``name``, declares it, or sets it on its instances."""
    if inspect.ismodule(found):
        return hasattr(found, name) or name in found.__annotations__
    if hasattr(found, name) or name in getattr(found, "__struct_fields__", ()):
        return True
    if dataclasses.is_dataclass(found) and name in {f.name for f in dataclasses.fields(found)}:
        return True
    for base in found.__mro__[:-1]:
        if name in getattr(base, "__annotations__", {}):
            return True
        try:
            text = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        # An assignment, alone or in a tuple, which may have a line for each.
        one = rf"^ +(?:self\.\w+, )*self\.{name}(?:, self\.\w+)*(?:: [^=\n]+)? ="
        if re.search(rf"{one}|^ +self\.{name}(?:,|: .*)$", text, re.MULTILINE):
            return True
    return False


def imports_of(tree: ast.Module, file: str) -> dict[str, list[str]]:
    """Where a file of ours looks for each name of vLLM: in one place, or in the next one where
    another vLLM has it elsewhere (``try`` and ``except ImportError``)."""
    found, tried = {}, set()
    for attempt in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        first = _imported(attempt.body)
        others = [_imported(handler.body) for handler in attempt.handlers]
        for name, node in first.items():
            places = [_place(node, name), *(_place(o[name], name) for o in others if name in o)]
            if len(places) > 1:
                found[f"{file}: {name}, tried"] = places
                tried |= {id(node), *(id(o[name]) for o in others if name in o)}
    for node in ast.walk(tree):
        if id(node) not in tried:
            for name in _imported([node] if isinstance(node, ast.ImportFrom) else []):
                found[f"{file}: {_place(node, name)}"] = [_place(node, name)]
    return found


def _imported(body: list[ast.stmt]) -> dict[str, ast.ImportFrom]:
    return {
        alias.name: node
        for node in body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def _place(node: ast.ImportFrom, name: str) -> str:
    return f"{node.module}:{name}"


IMPORTS = {
    what: places
    for file in sorted(SOURCE.rglob("*.py"))
    for what, places in imports_of(ast.parse(file.read_text()), file.stem).items()
}


@pytest.mark.parametrize("places", IMPORTS.values(), ids=IMPORTS)
def test_what_we_import_is_there(places):
    assert any(map(is_there, places)), f"vLLM has none of {places}"


def is_there(place: str) -> bool:
    module, _, name = place.partition(":")
    with contextlib.suppress(ImportError):
        # Lazy attributes and submodules included.
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.import_module(f"{module}.{name}")
        )
    return False


def test_a_failed_start_asks_which_processes_ended():
    """There :class:`sipipe.engine.start.ends.EngineProcesses` says how; it is made by its name."""
    watch = inspect.getsource(resolve("vllm.v1.engine.utils:wait_for_engine_startup"))
    assert "launch.engine_manager.finished_procs()" in watch
    launch = inspect.getsource(resolve("vllm.v1.engine.utils:launch_core_engines"))
    assert "= CoreEngineProcManager(" in launch


def test_processes_are_started_by_functions_that_are_looked_up():
    """So that one of ours may stand there (:mod:`sipipe.engine.start.ends`)."""
    manager = inspect.getsource(resolve("vllm.v1.engine.utils:CoreEngineProcManager.__init__"))
    assert "target=EngineCoreProc.run_engine_core" in manager
    balancer = inspect.getsource(resolve("vllm.v1.engine.coordinator:DPCoordinator.__init__"))
    assert "target=DPCoordinatorProc.run_coordinator" in balancer
    servers = inspect.getsource(resolve("vllm.v1.utils:APIServerProcessManager.__init__"))
    assert "target=target_server_fn or run_api_server_worker_proc" in servers


def test_what_is_missing_is_missed():
    place = "vllm.v1.core.sched.scheduler:Scheduler"
    assert not has(resolve(place), "no_such_attribute")
    with pytest.raises(AssertionError):
        test_functions_have_the_parameters(f"{place}.schedule", "self no_such_parameter")
