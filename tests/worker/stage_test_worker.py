"""A CPU worker that runs through vLLM's runner or SiPipe's stage runner, as it is told.

Not a test: `stage_run.py` names it as vLLM's ``worker_cls``. One engine serves as the oracle and
as the subject, since a process can hold only one.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from plain_bank import PlainBank
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from sipipe.worker.executor import StageExecutor
from sipipe.worker.runner import StageRunner


class StageTestWorker(CPUWorker):
    """Greedy argmax over the stage runner's logits, or vLLM's own path.

    ``STAGE_SLOTS`` and ``STAGE_VERSIONS`` in the environment; ``STAGE_THREADS=1`` runs the
    iterations through :class:`StageExecutor`'s two threads.
    """

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self.slots = int(os.environ.get("STAGE_SLOTS", "1"))
        self.versions = int(os.environ.get("STAGE_VERSIONS", "2"))
        sizes = [int(n) for n in os.environ.get("STAGE_GRAPHS", "").split()]
        self.runner = StageRunner(
            self.model_runner,
            slots=self.slots,
            versions=self.versions,
            check_token_safety=True,
            bank=PlainBank(sizes, self.versions) if sizes else None,
        )
        # Not at the top: brings Numba, which vLLM's worker must not find while it starts.
        from sipipe.engine.balance import Balancer
        from sipipe.engine.requests import RequestTracker

        # What SiPipe's executor does: fills in the tokens that vLLM's scheduler leaves out, and
        # says which requests the rows of the logits are.
        self.tracker = RequestTracker(
            engine_seed=0, balancer=Balancer(1, vocab_size=self.model_config.get_vocab_size())
        )
        self.lora = self.vllm_config.lora_config is not None
        self.stock = True
        self.iteration = self.steady = self.padded = 0
        self.executor = None
        if os.environ.get("STAGE_THREADS") == "1":
            self.executor = StageExecutor(self, versions=self.versions, depth=self.slots)

    def use_stock(self, stock: bool) -> None:
        self.stock = stock

    def facts(self) -> dict[str, Any]:
        counters = self.runner.counters
        return {
            "iterations": self.iteration,
            "steady": self.steady,
            "padded": self.padded,
            **{name: getattr(counters, name) for name in counters.__slots__},
        }

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        if self.stock:
            return super().execute_model(scheduler_output)
        iteration = self.iteration
        self.iteration += 1
        if get_pp_group().is_last_rank:
            self.told = self.tracker.advance(iteration, scheduler_output)
        if self.executor is not None:
            self.executor.submit(iteration, iteration % self.slots, scheduler_output)
            self.executor.drain()
        else:
            inputs = self.prepare(
                iteration, iteration % self.slots, iteration % self.versions, scheduler_output
            )
            result = self.forward(iteration, inputs, self.receive(iteration, inputs))
            self.send(iteration, inputs, result)
        return None if scheduler_output.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.stock:
            return super().sample_tokens(grammar_output)
        return self.result

    # ---- StageCalls -----------------------------------------------------------------------------

    def prepare(self, iteration: int, slot: int, version: int, output: Any) -> Any:
        inputs = self.runner.prepare(output, slot, version, iteration)
        if get_pp_group().is_last_rank:
            assert inputs.sampled_req_ids == self.told.sampled, "rows that the samplers expect"
        return inputs

    def announce(self, iteration: int, inputs: Any) -> None:
        pass

    def receive(self, iteration: int, inputs: Any) -> Any:
        pp = get_pp_group()
        if pp.is_first_rank or not inputs.num_tokens:
            return None
        tensors, handles, finish = pp.irecv_tensor_dict(all_gather_group=get_tp_group())
        for handle in handles:
            handle.wait()
        for call in finish:
            call()
        return tensors

    def forward(self, iteration: int, inputs: Any, received: Any) -> Any:
        return self.runner.forward(inputs, received)

    def send(self, iteration: int, inputs: Any, result: Any) -> None:
        self.steady += inputs.steady
        self.padded += inputs.num_tokens_padded > inputs.num_tokens
        self.result = None
        if result is None:
            return
        if isinstance(result, dict):
            pp = get_pp_group()
            for handle in pp.isend_tensor_dict(result, all_gather_group=get_tp_group()):
                handle.wait()
            return
        tokens: list[list[int]] = [[] for _ in inputs.req_ids]
        if len(inputs.sampled):
            logits = self.runner.logits(inputs, result)
            head = self.runner.head
            assert (head.shard is None) == (get_tp_group().world_size == 1 or self.lora)
            assert logits.shape[1] == head.columns[1] - head.columns[0]
            if head.shard is not None:
                shards: list[Any] = [None] * get_tp_group().world_size
                torch.distributed.all_gather_object(shards, logits, group=get_tp_group().cpu_group)
                logits = torch.cat(shards, dim=1)
            assert logits.shape[1] == head.vocab_size
            for row, token in zip(inputs.sampled, logits.argmax(dim=-1).tolist(), strict=True):
                tokens[row] = [token]
                self.tracker.record(inputs.iteration, inputs.req_ids[row], token)
        self.result = ModelRunnerOutput(
            req_ids=list(inputs.req_ids),
            req_id_to_index={req_id: i for i, req_id in enumerate(inputs.req_ids)},
            sampled_token_ids=tokens,
            prompt_logprobs_dict=self.runner.prompt_logprobs(inputs, result),
        )
