"""A CPU worker that runs through vLLM's runner or SiPipe's stage runner, as it is told.

Not a test: `stage_run.py` names it as vLLM's ``worker_cls``. One engine serves as the oracle and
as the subject, since a process can hold only one.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from sipipe.worker.double_buffer import DoubleBuffer


class StageTestWorker(CPUWorker):
    """Greedy argmax over the stage runner's logits, or vLLM's own path.

    ``STAGE_SLOTS`` in the environment; ``STAGE_THREADS=1`` runs the iterations through
    :class:`DoubleBuffer`'s two threads.
    """

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        # Not at the top: these bring Numba, which vLLM's worker must not find while it starts.
        from sipipe.worker.runner import StageRunner

        from sipipe.engine.balance import Balancer
        from sipipe.engine.requests import RequestTracker

        self.slots = int(os.environ.get("STAGE_SLOTS", "1"))
        self.runner = StageRunner(self.model_runner, slots=self.slots, check_token_safety=True)
        self.count_calls()
        # What SiPipe's executor does: fills in the tokens that vLLM's scheduler leaves out, and
        # says which requests the rows of the logits are.
        self.tracker = RequestTracker(
            engine_seed=0, balancer=Balancer(1, vocab_size=self.model_config.get_vocab_size())
        )
        self.lora = self.vllm_config.lora_config is not None
        self.product = self.packed_product()
        self.stock = True
        self.iteration = 0
        self.double_buffer = None
        if os.environ.get("STAGE_THREADS") == "1":
            self.double_buffer = DoubleBuffer(self, sets=2, stall_timeout=60)
            threading.Thread(target=self.double_buffer.run, daemon=True).start()

    def packed_product(self) -> Any:
        """A product of vLLM's, of other sizes than the model's, to be made between two layers."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        other = torch.nn.Linear(96, 640, bias=False).requires_grad_(False)
        weight = other.weight.clone()
        dispatch_cpu_unquantized_gemm(other, remove_weight=False)

        def product(rows: int) -> None:
            hidden = torch.randn(rows, 96)
            torch.testing.assert_close(other.cpu_linear(hidden, weight, None), hidden @ weight.T)

        return product

    def count_calls(self) -> None:
        """Of what costs a preparation time."""
        self.calls = {"steady": 0, "added": 0, "resumed": 0}
        preparer = self.runner.preparer
        for name, owner, method in (
            ("steady", preparer, "_write_steady"),
            ("added", preparer.states, "add"),
            ("resumed", preparer.states, "resume"),
        ):
            setattr(owner, method, self.counted(name, getattr(owner, method)))

    def counted(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **kwargs)

        return call

    def use_stock(self, stock: bool) -> None:
        self.stock = stock

    def facts(self) -> dict[str, Any]:
        # A request that is added starts like one that is resumed.
        resumed = self.calls["resumed"] - self.calls["added"]
        return {"iterations": self.iteration, **self.calls, "resumed": resumed}

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        if self.stock:
            return super().execute_model(scheduler_output)
        iteration = self.iteration
        self.iteration += 1
        if get_pp_group().is_last_rank:
            self.told = self.tracker.advance(iteration, scheduler_output)
        slot = iteration % self.slots
        if self.double_buffer is not None:
            self.double_buffer.prepare(iteration, slot, scheduler_output)
            self.double_buffer.drain()
        else:
            inputs = self.prepare(iteration, slot, iteration % 2, scheduler_output)
            self.send(inputs, self.forward(inputs, self.receive(inputs)))
        return None if scheduler_output.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.stock:
            return super().sample_tokens(grammar_output)
        return self.result

    # ---- the steps of an iteration ----------------------------------------------------------------

    def prepare(self, iteration: int, slot: int, buffer_set: int, output: Any) -> Any:
        inputs = self.runner.prepare(output, slot, buffer_set, iteration)
        if get_pp_group().is_last_rank:
            sampled = [inputs.req_ids[row] for row in inputs.sampled]
            assert sampled == self.told.sampled, "rows that the samplers expect"
        return inputs

    def receive(self, inputs: Any) -> Any:
        pp = get_pp_group()
        if pp.is_first_rank or not inputs.num_tokens:
            return None
        tensors, handles, finish = pp.irecv_tensor_dict(all_gather_group=get_tp_group())
        for handle in handles:
            handle.wait()
        for call in finish:
            call()
        return tensors

    def forward(self, inputs: Any, received: Any) -> Any:
        left: list[float] = []

        def between(share: float) -> None:
            left.append(share)
            self.product(1 + 7 * (inputs.iteration + len(left)) % 64)

        result = self.runner.forward(inputs, received, between)
        layers = len(inputs.attn_metadata)
        assert left == [1 - layer / layers for layer in range(layers)], "once a layer"
        return result

    def send(self, inputs: Any, result: Any) -> None:
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
            head = self.runner.head
            logits = head.compute(self.runner.rows(inputs, result))
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
