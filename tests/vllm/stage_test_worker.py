"""A CPU worker that runs through vLLM's runner or SiPipe's stage runner, as the test says.

Not a test: `test_stage_runner_parity.py` names it as vLLM's ``worker_cls``. One engine serves as
the oracle and as the subject, since a process can hold only one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from sipipe.vllm.stage_runner import StageRunner
from sipipe.vllm.stage_tokens import TokenHistory

SETTINGS: dict[str, Any] = {"slots": 1, "versions": 2, "stock": False}
WORKERS: list[StageTestWorker] = []


class StageTestWorker(CPUWorker):
    """Greedy argmax over the stage runner's logits, or vLLM's own path; one stage."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self.slots, self.versions = SETTINGS["slots"], SETTINGS["versions"]
        self.runner = StageRunner(
            self.model_runner, slots=self.slots, versions=self.versions, check_token_safety=True
        )
        self.history = TokenHistory()
        self.iteration = 0
        self.steady = 0
        WORKERS.append(self)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        if SETTINGS["stock"]:
            return super().execute_model(scheduler_output)
        self.history.fill(scheduler_output)
        iteration = self.iteration
        inputs = self.runner.prepare(
            scheduler_output, iteration % self.slots, iteration % self.versions, iteration
        )
        hidden = self.runner.forward(inputs)
        if hidden is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.iteration += 1
        self.steady += inputs.steady
        assert isinstance(hidden, torch.Tensor)
        assert inputs.logits_rows is not None
        tokens: list[list[int]] = [[] for _ in inputs.req_ids]
        if len(inputs.sampled):
            logits = self.runner.compute_logits(hidden[inputs.logits_rows])
            best = logits.argmax(dim=-1).tolist()
            for row, token in zip(inputs.sampled, best, strict=True):
                tokens[row] = [token]
        prompt_logprobs = self.runner.prompt_logprobs(inputs, hidden)
        self.history.record(inputs.req_ids, tokens)
        self.result = ModelRunnerOutput(
            req_ids=list(inputs.req_ids),
            req_id_to_index={req_id: i for i, req_id in enumerate(inputs.req_ids)},
            sampled_token_ids=tokens,
            prompt_logprobs_dict=prompt_logprobs,
        )
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        if SETTINGS["stock"]:
            return super().sample_tokens(grammar_output)
        return self.result
