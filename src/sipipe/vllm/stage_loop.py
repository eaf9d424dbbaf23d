"""One stage's part of an iteration: inputs, hidden states in, forward, hidden states or logits out.

The loop owns the stage's ends of the data plane: the link from the previous stage, the link to
the next, and on the last stage the writer of BIC-L. Which thread runs which step is decided by
:mod:`sipipe.vllm.stage_executor`; in turn, or overlapped (token-safe execution).

Invariant: rows of a logits slot are the sampled requests in the order of
``SchedulerOutput.num_scheduled_tokens``, which is also the order in which the executor tells the
samplers whose rows they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.channels import LogitsWriter
from sipipe.transfer import LinkEndpoint, Receiver, Sender, open_receiver, open_sender
from sipipe.vllm.processes import WorkerBoot
from sipipe.vllm.stage_runner import ModelInput, StageRunner

Report = Callable[[int, dict[str, Any]], None]
Doing = Callable[[str], None]

LOGITS_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class StageLoop:
    """One worker's steady path.

    Args:
        boot: what the process was started with.
        worker: vLLM's worker, its model loaded.
        report: tells the executor that an iteration has run, where no sampler will.
        doing: says what the worker is about to do, for the stall report.
    """

    def __init__(self, boot: WorkerBoot, worker: Any, report: Report, doing: Doing) -> None:
        self._boot = boot
        self._place = boot.place
        self._worker = worker
        self._report = report
        self._doing = doing
        self._runner: StageRunner | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._logits: LogitsWriter | None = None
        self._stock_iteration = 0

    # ---- opening, by control calls ------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What the executor needs to make this rank's channels; the KV cache is set up by now."""
        model_config = self._boot.vllm_config.model_config
        stock = self._worker.model_runner
        unsupported = StageRunner.reason(stock) or ""
        if self._boot.path == "sipipe" and not unsupported:
            self._runner = StageRunner(
                stock,
                slots=self._boot.slots,
                versions=2 if self._boot.config.overlap else 1,
                check_token_safety=self._boot.config.check_token_safety,
            )
        info: dict[str, Any] = {
            "unsupported": unsupported,
            "activation_bytes": 2 * model_config.get_hidden_size() * model_config.dtype.itemsize,
        }
        if self._place.is_last and self._runner is not None:
            hidden = torch.zeros(
                1, model_config.get_hidden_size(), dtype=model_config.dtype, device=stock.device
            )
            logits = self._runner.compute_logits(hidden)
            if logits is not None:
                info["logits_width"] = logits.shape[1]
                info["logits_dtype"] = LOGITS_DTYPES[logits.dtype]
        return info

    def open(self, *, links: list[LinkEndpoint], logits: Any) -> None:
        """Open this rank's ends of the links and, on the last stage, the writer of BIC-L."""
        place = self._place
        if not place.is_first:
            self._receiver = open_receiver(links[place.rank - place.tp_size])
        if not place.is_last:
            self._sender = open_sender(links[place.rank])
        elif place.tp_rank == 0 and logits is not None:
            self._logits = LogitsWriter.open(logits, rank=0)
        group = get_pp_group()
        group.receive, group.send = self._receive_stock, self._send_stock

    # ---- SiPipe's path --------------------------------------------------------------------------

    def run(self, iteration: int, slot: int, output: SchedulerOutput) -> None:
        """Run one iteration, prepare and forward in turn."""
        inputs = self.prepare(iteration, slot, output)
        self.execute(inputs)

    def prepare(self, iteration: int, slot: int, output: SchedulerOutput) -> ModelInput:
        """The CPU executor's part: inputs of ``iteration`` into its version."""
        assert self._runner is not None
        self._doing(f"prepares iteration {iteration}")
        version = iteration % (2 if self._boot.config.overlap else 1)
        inputs = self._runner.prepare(output, slot, version, iteration)
        if self._receiver is not None:
            self._receiver.post(iteration, inputs.num_tokens_padded)
        return inputs

    def execute(self, inputs: ModelInput) -> None:
        """The device executor's part: hidden states in, forward, hidden states or logits out."""
        assert self._runner is not None
        iteration = inputs.iteration
        intermediate = None
        if self._receiver is not None:
            self._doing(f"waits for hidden states of iteration {iteration}")
            intermediate = self._receiver.take(iteration)
        self._doing(f"runs iteration {iteration} ({inputs.num_tokens} tokens)")
        result = self._runner.forward(inputs, intermediate)
        if self._receiver is not None:
            self._receiver.release(iteration)
        if self._sender is not None:
            assert isinstance(result, dict)
            self._doing(f"sends hidden states of iteration {iteration}")
            self._sender.send(iteration, inputs.num_tokens_padded, result)
        elif self._place.is_last:
            assert isinstance(result, torch.Tensor)
            self._finish(inputs, result)

    def _finish(self, inputs: ModelInput, hidden: torch.Tensor) -> None:
        """Last stage: logits to the samplers, and a report where the executor waits for one."""
        assert self._runner is not None
        iteration = inputs.iteration
        rows = len(inputs.sampled)
        asked = bool(inputs.prompt_rows)
        extras = self._runner.prompt_logprobs(inputs, hidden) if asked else {}
        if rows:
            assert inputs.logits_rows is not None
            logits = self._runner.compute_logits(
                hidden[: inputs.num_tokens]
                if rows == inputs.num_tokens
                else hidden[inputs.logits_rows]
            )
            if self._logits is not None:
                self._doing(f"hands over logits of iteration {iteration}")
                with self._logits.acquire(iteration, rows) as region:
                    _store(region, logits, self._boot.config.logits_layout)
        if (extras or not rows) and self._place.tp_rank == 0:
            self._report(iteration, extras)

    def drain(self) -> None:
        """Return when no iteration is in the worker; control calls run then."""
        if self._sender is not None:
            self._sender.wait_sent()

    # ---- vLLM's own path ------------------------------------------------------------------------

    def run_stock(self, execute_model: Callable[..., Any], output: SchedulerOutput) -> Any:
        """vLLM's ``execute_model``; its hidden states go through our links."""
        if output.total_num_scheduled_tokens > 0:
            self._stock_iteration += 1
            if self._receiver is not None:
                self._receiver.post(self._stock_iteration, output.total_num_scheduled_tokens)
        result = execute_model(output)
        if self._receiver is not None and output.total_num_scheduled_tokens > 0:
            self._receiver.release(self._stock_iteration)
        return result

    def _receive_stock(self) -> dict[str, torch.Tensor]:
        assert self._receiver is not None
        self._doing(f"waits for hidden states of step {self._stock_iteration}")
        return self._receiver.take(self._stock_iteration)

    def _send_stock(self, tensors: Any) -> None:
        assert self._sender is not None
        rows = max(tensor.shape[0] for tensor in tensors.values())
        self._sender.send(self._stock_iteration, rows, tensors)
        self._sender.wait_sent()

    def close(self) -> None:
        for end in (self._receiver, self._sender, self._logits):
            if end is not None:
                end.close()


def _store(region: np.ndarray, logits: torch.Tensor, layout: str) -> None:
    """Copy logits [n, V] into a BIC-L region, transposed for the column layout.

    bfloat16 has no NumPy type: region and logits are compared as their bits.
    """
    target = torch.from_numpy(region)
    if target.dtype in (torch.uint16, torch.int16):
        target = target.view(torch.bfloat16)
    target.copy_(logits if layout == "rows" else logits.T)
