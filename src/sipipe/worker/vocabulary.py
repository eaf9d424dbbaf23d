"""The output projection shared out over all stages: each multiplies by its columns.

The last stage's final hidden states, of the rows that sample, go to every other stage on a link of
their own. There they are multiplied by that stage's rows of the matrix, whose logits go into the
same place of BIC-L as everybody's: samplers draw when the last writer is done. The rows come from
the last stage's loaded model, whatever its checkpoint looks like, and the product is vLLM's.

Who runs here: the device thread, alone, but for :meth:`SharedHead.drain` and ``close``. A product
comes between two forward passes, the oldest iteration first.

Why no cycle of waits can form
    Order what is to be done by iteration, within one by stage, forward passes first, then all
    products, then the draws. Everything waits only for what is smaller: a forward pass for the
    stage before, a product for the last stage's pass, a draw for the products; buffers of links and
    of BIC-L for what an iteration m before has left, which was resolved before this one was
    published (and the pieces of a long prompt for the next stage to take those before). A stage's device thread never waits for one thing while it could do another: it
    sleeps until the next inputs, or the hidden states of its next pass, *or* the oldest product's
    rows are there (:meth:`SharedHead.serve`). So the smallest thing that is not done can always be
    done. Tensor-parallel ranks may do the products of a stage at different places between its
    passes: a product calls no collective, so that a rank that waits for another in a pass waits for
    something that ends by itself.
"""

from __future__ import annotations

import select
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from sipipe.errors import ResourceError, StallError
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.memory import PAGE, SharedMemory
from sipipe.messages.boots import HeadOffer
from sipipe.messages.measured import TIMES, Measured
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.logits import StageLogits, placed_in

Project = Callable[[ModelInput, torch.Tensor], None]
"""Multiplies an iteration's final hidden states [n, H] and writes the logits."""
_KEY = "hidden_states"


class OfferedHead:
    """A rank's rows of the loaded model's head, in memory that other stages can read.

    Args:
        head: the last stage's.
        hidden: some rows of hidden states, not all zero, of the model's dtype.

    Attributes:
        reason: why the head cannot be shared out; then there is nothing else.
    """

    def __init__(self, head: StageLogits, hidden: torch.Tensor) -> None:
        self._memory: SharedMemory | None = None
        found = _find(head, hidden)
        if isinstance(found, str):
            self.reason = found
            return
        self.reason = ""
        self._module, processor = found
        start, stop = head.columns
        weight = self._module.weight.detach()[: stop - start]
        try:
            self._memory = SharedMemory.create("head", PAGE + weight.nbytes, None)
        except ResourceError as error:
            self.reason = str(error)
            return
        self.offer = HeadOffer(
            memory=self._memory.endpoint,
            columns=head.columns,
            hidden=weight.shape[1],
            scale=processor.scale,
            soft_cap=processor.soft_cap,
        )
        _rows(self._memory, self.offer, weight.dtype).copy_(weight)

    def close(self, *, taken: bool = True) -> None:
        """Every stage has taken its rows, or the last stage keeps them."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # the mapping goes with it, and with that memory for all rows
        if taken:
            # What scores prompts packs the whole matrix again when somebody asks for it.
            self._module.cpu_linear = self._pack_and_multiply

    def _pack_and_multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        dispatch_cpu_unquantized_gemm(self._module, remove_weight=False)
        product: torch.Tensor = self._module.cpu_linear(x, weight, bias)
        return product


def _find(head: StageLogits, hidden: torch.Tensor) -> tuple[Any, LogitsProcessor] | str:
    """The module with the matrix and what multiplies by it; or why its rows are not all there is."""
    if head.processor is None:
        return "the model computes its logits in a way of its own"
    calls: list[tuple[Any, ...]] = []
    with head.processor.register_forward_hook(
        lambda _, args, kwargs, result: calls.append((args, kwargs, result)), with_kwargs=True
    ):
        logits = head.compute(hidden)
    if len(calls) != 1 or logits is None:
        return "the model computes its logits in a way of its own"
    (module, rows, *bias), kwargs, result = calls[0]
    if type(getattr(module, "quant_method", None)) is not UnquantizedEmbeddingMethod:
        return "the output projection is quantized"
    if any(value is not None for value in [*bias, *kwargs.values()]):
        return "the output projection has a bias"
    if not torch.equal(rows, hidden) or not torch.equal(result[:, : logits.shape[1]], logits):
        return "the model does more to its logits than to project, cap and scale them"
    start, stop = head.columns
    if logits.dtype != hidden.dtype or logits.shape[1] != stop - start:
        return "the output projection has a type or a size of its own"
    if module.shard_indices.num_added_elements or (module.tp_size > 1 and head.shard is None):
        return "the model has added vocabulary"
    return module, head.processor


class HeadShard(torch.nn.Module):
    """Some rows of the output projection, by vLLM's kernels.

    Args:
        offers: of the last stage's ranks, each with its tokens.
        start, stop: first token, and the one behind the last; all of one offer.
        dtype: the model's.
    """

    def __init__(
        self, offers: Sequence[HeadOffer], start: int, stop: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        offer = next(o for o in offers if o.columns[0] <= start and stop <= o.columns[1])
        memory = SharedMemory.attach(offer.memory)
        first = offer.columns[0]
        rows = _rows(memory, offer, dtype)[start - first : stop - first].clone()
        memory.close()
        self.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_size = 1
        self._tokens = stop - start
        self._project = LogitsProcessor(self._tokens, scale=offer.scale, soft_cap=offer.soft_cap)
        if self._tokens:
            dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def compute(self, hidden: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """[n, H] to [n, tokens of this shard]; ``into`` is as :meth:`StageLogits.compute` has it."""
        if not self._tokens:
            return hidden[:, :0]
        with placed_in(into, hidden):
            logits: torch.Tensor = self._project(self, hidden)
        return logits


def time_parts(vllm_runner: Any, head: StageLogits | None, sequences: int) -> Measured:
    """Seconds that the layers take for ``sequences`` decoding ones, without their attention, and on
    the last stage, which has ``head``, the whole output projection. All stages at once."""

    def median(call: Callable[[], object]) -> float:
        call()  # does not count
        taken = []
        for _ in range(TIMES):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    config = vllm_runner.model_config
    with set_current_vllm_config(vllm_runner.vllm_config), torch.inference_mode():
        layers = median(lambda: vllm_runner._dummy_run(sequences))
        if head is None:
            return Measured(layers=layers)
        hidden = torch.randn(sequences, config.get_hidden_size(), dtype=config.dtype)
        return Measured(layers=layers, head=median(lambda: head.compute(hidden)))


def _rows(memory: SharedMemory, offer: HeadOffer, dtype: torch.dtype) -> torch.Tensor:
    tokens = offer.columns[1] - offer.columns[0]
    flat = torch.frombuffer(memory.map, dtype=dtype, count=tokens * offer.hidden, offset=PAGE)
    return flat.view(tokens, offer.hidden)


class SharedHead:
    """A stage's part of every iteration's product.

    Args:
        senders: the last stage's, one to each other stage.
        receiver: another stage's, of final hidden states.
        project: what is done with them.
        bound: seconds of a wait.
    """

    def __init__(
        self,
        senders: Sequence[Sender],
        receiver: Receiver | None,
        project: Project,
        bound: float,
    ) -> None:
        self._senders = senders
        self._receiver = receiver
        self._project = project
        self._bound = bound
        self._due: deque[ModelInput] = deque()
        """Iterations whose forward pass has run here, and whose product has not."""
        self._idle = threading.Event()
        self._idle.set()

    def spread(self, inputs: ModelInput, rows: torch.Tensor) -> None:
        """Last stage: final hidden states [n, H] of the rows that sample, to all other stages."""
        for sender in self._senders:
            # wait: stall_timeout; a stage that is m products behind, or its end
            sender.send(inputs.iteration, len(rows), {_KEY: rows})

    def expect(self, inputs: ModelInput) -> None:
        """Another stage: the iteration's forward pass has run here; its product is to come."""
        if len(inputs.sampled):
            self._idle.clear()
            self._due.append(inputs)

    def serve(self, until: Sequence[int]) -> None:
        """Do what is due as it comes, until a descriptor of ``until`` is readable or nothing is.

        Raises:
            StallError: nothing came within the bound. Otherwise as :meth:`Receiver.take`.
        """
        receiver = self._receiver
        while self._due:
            assert receiver is not None, "the last stage never waits for itself"
            poll = select.poll()
            for descriptor in (*receiver.descriptors, *until):
                poll.register(descriptor, select.POLLIN)
            # wait: stall_timeout; the last stage's rows, its end, or what the caller waits for
            ready = {descriptor for descriptor, _ in poll.poll(self._bound * 1e3)}
            if ready and ready.isdisjoint(receiver.descriptors):
                return
            inputs = self._due[0]
            try:
                rows: Mapping[str, torch.Tensor] = receiver.take(
                    inputs.iteration, len(inputs.sampled), timeout=0
                )
            except StallError:
                if not ready:
                    raise
                continue  # what came was no frame
            self._project(inputs, rows[_KEY])
            receiver.release(inputs.iteration)
            self._due.popleft()
            if not self._due:
                self._idle.set()

    def drain(self) -> None:
        """Return when nothing is due; no iteration is in the worker.

        Raises:
            StallError: not within the bound.
        """
        # wait: stall_timeout; the device thread, when nothing is due, or `close`
        if not self._idle.wait(self._bound):
            raise StallError(f"waited {self._bound:g} s for {self.doing()}")

    def doing(self) -> str:
        """What is due, for the report of a stall."""
        due = list(self._due)
        return f"its columns of the logits of iteration {due[0].iteration} are due" if due else ""

    def close(self) -> None:
        """End the links, and whatever waits for them."""
        for end in (*self._senders, self._receiver):
            if end is not None:
                end.close()
        self._idle.set()
