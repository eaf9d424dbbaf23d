"""A stage whose model is loaded: what the engine asks of it, before its first iteration and then.

It says what it writes, how long its parts take and what of the output projection it takes; then its
channels are opened, and :class:`~sipipe.worker.sampled_stage.SampledStage` runs iterations.

Who runs here: whoever follows BIC-I, in control calls with no iteration in the worker, and to hand
iterations over.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config

from sipipe.cores import bind_threads, run_soon
from sipipe.ipc.link.cuda_device import gpu_name
from sipipe.ipc.link.schema import TensorSchema, buffer_bytes
from sipipe.messages import calls
from sipipe.messages.link import buffer_tokens
from sipipe.messages.logits import LogitsShape
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import StageDescription, WorkerBoot
from sipipe.worker.device import Device, HostDevice
from sipipe.worker.hooks.draws import LastRows, NothingDrawn, Pooled, WholeBatch, feedback_of
from sipipe.worker.inputs.buffers import PackedInputBuffers
from sipipe.worker.links import LinkEnds, Links, NoEnd
from sipipe.worker.measure import measure_stage
from sipipe.worker.projection.logits import LogitsHandover, StageLogits
from sipipe.worker.projection.share import ProjectionShare
from sipipe.worker.sampled_stage import ClosedStage, SampledStage, Surroundings

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer


def link_bytes(runner: Any, boot: WorkerBoot) -> int:
    """What links from other stages take of this rank's GPU, which of the transports it will be: by
    way of host memory, as much may be coming and in use, of torch's allocator."""
    schema = taken_schema(runner)
    if schema is None or runner.device.type == "cpu":
        return 0
    tokens = buffer_tokens(runner.max_num_reqs, runner.max_num_tokens)
    return max(2, boot.watched.inflight) * buffer_bytes(schema, tokens)


def taken_schema(runner: Any) -> TensorSchema | None:
    """Schema of the hidden states that the runner takes from the stage before; None on the first."""
    kept = getattr(runner, "intermediate_tensors", None)
    return None if kept is None else TensorSchema.capture(kept.tensors, runner.max_num_tokens)


class LoadedStage:
    """One worker's stage, of what is ``around``; made before vLLM warms its runner up, whose sampling
    it may replace. ``sockets``: of the links that its boot record lists."""

    def __init__(self, around: Surroundings, sockets: Sequence[socket.socket]) -> None:
        self._around = around
        pairs = zip(around.boot.links, sockets, strict=True)
        self._ends = LinkEnds(around.boot.place, pairs, around.fail)
        self._bound = False
        self._links = Links(around.boot.place, NoEnd(), NoEnd())
        self.running: SampledStage | ClosedStage = ClosedStage()
        boot, worker, runner = around.boot, around.worker, around.runner
        self._device: Device
        self.sharing: ProjectionShare
        self._device, self.sharing = worker.parts(boot)
        if not isinstance(self._device, HostDevice):
            # Before graphs are captured, which know the addresses.
            sizes = runner.max_num_reqs, runner.max_num_tokens, boot.rows
            runner.input_buffers = PackedInputBuffers(*sizes, runner.device)
        self._draws = NothingDrawn()
        if runner.is_last_pp_rank and not runner.is_pooling_model:
            logits = StageLogits(runner)
            self._draws = LastRows(runner, self._device, logits, reports=around.reports)
        self._projection = self._draws.projection
        self._logits: LogitsHandover | None = None
        """This rank's writer of BIC-L, if it is one."""
        if boot.path == "sipipe" and not boot.measures:
            self._take_over(boot.config.cpu_sampling)
        # What links from other stages, and shares of the output projection, take of this GPU.
        worker.reserved = link_bytes(runner, boot) + self.sharing.device_bytes()

    # ---- control calls --------------------------------------------------------------------------

    def answer(self, request: calls.Request[Any]) -> Any:
        """What the engine asked."""
        match request:
            case calls.Describe():
                return self.describe()
            case calls.TimeParts(sequences=sequences):
                return self.sharing.time_parts(self._draws.stage_logits, sequences)
            case calls.TakeProjection(offers=offers, bounds=bounds):
                return self.sharing.take(offers, bounds)
            case calls.OpenLinks(trials=trials, hung=hung):
                self._bind()
                return self._ends.try_out(trials, hung)
            case calls.OpenChannels():
                return self.open(request)
            case calls.Measure(sequences=sequences):
                return self._measure(sequences)
            case calls.ChooseDrawer(draws=draws):
                return self._settle(draws)
        raise AssertionError(f"nobody answers {request}")

    def describe(self) -> StageDescription:
        """What the engine needs to make this rank's channels; the KV cache is set up by now."""
        around, stage_logits = self._around, self._draws.stage_logits
        config, device = around.boot.vllm_config, around.runner.device
        takes = taken_schema(around.runner)
        described = partial(
            StageDescription,
            takes=b"" if takes is None else takes.encode(),
            gpu=gpu_name(device.index or 0) if device.type == "cuda" else "",
        )
        if stage_logits is None:
            return described()
        with set_current_vllm_config(config):
            if config.lora_config is not None:
                around.runner._set_active_loras((0,), (0,), set())  # the projection looks for one
            model = config.model_config
            hidden = torch.randn(3, model.get_hidden_size(), dtype=model.dtype).to(device)
            with torch.inference_mode():
                logits = stage_logits.compute_first(hidden)
                offered = self.sharing.offer(stage_logits, hidden)
        if logits is None:
            return described(offer=offered)
        shape = LogitsShape(
            vocab=stage_logits.vocab_size if stage_logits.bounds else logits.shape[1],
            dtype=str(logits.dtype).removeprefix("torch."),
            # Every rank writes its columns, or the first one rows that vLLM has gathered.
            bounds=stage_logits.bounds,
        )
        return described(logits=shape, offer=offered)

    def _measure(self, sequences: int) -> Measured:
        """How long the parts of a microbatch take, drawn on this device and by CPU samplers."""
        around = self._around
        with set_current_vllm_config(around.boot.vllm_config):
            return measure_stage(
                around.runner, self._device, sequences, self._draws.stage_logits, self._logits
            )

    def open(self, request: calls.OpenChannels) -> None:
        """Use the links, which have been tried; where samplers draw, open BIC-L's writer too."""
        around, sharing, logits = self._around, self.sharing, request.logits
        self._bind()
        self._links = Links.of(around.boot.place, self._ends)
        if logits is None:
            self._draw_here()
        else:
            writes = self._draws.stage_logits is not None or sharing.shard is not None
            if writes and sharing.writer < logits.shape.ranks:
                self._logits = LogitsHandover(logits, rank=sharing.writer)
                self._device.lock_pages(self._logits.buffer)
            sharing.withdraw_offer()
            if sharing.shard is not None:
                self._projection = sharing.open(
                    self._ends, self._logits, around.record, around.fail
                )
        if not around.boot.measures:
            self._begin()

    def _bind(self) -> None:
        """Bind a GPU's worker to its cores, with the threads of links that start from now on. Not
        before: compilers and warm-up may take all cores."""
        if self._around.boot.cpus and not self._bound:
            bind_threads(self._around.boot.cpus)
            run_soon()
            self._bound = True

    def _settle(self, draws: str) -> None:
        """Who draws, as ``cpu_sampling`` says it, now that it was measured; no iteration has run."""
        if draws == "off":
            self._draw_here()
        else:
            self._take_over(draws)
        self._begin()

    def _begin(self) -> None:
        self.running = SampledStage(
            self._around, self._links, self._device, self._draws, self._projection, self._logits
        )

    def _take_over(self, draws: str) -> None:
        """CPU samplers draw from now on; ``draws`` is as ``cpu_sampling`` has it."""
        self._around.worker.feedback = feedback_of(self._around.runner, draws=True)
        self._draws = self._draws.take_over(per_row=draws == "per_row")

    def _draw_here(self) -> None:
        """vLLM's own sampler draws from now on, and nobody reads logits."""
        around, boot = self._around, self._around.boot
        bound = boot.config.stall_timeout
        told: dict[str, Any] = {"reports": around.reports, "stall_timeout": bound}
        if around.runner.is_pooling_model:
            self._draws = Pooled(**told)
        elif around.runner.is_last_pp_rank and boot.sampler_kernels:
            self._draws = WholeBatch(**told)
        elif around.runner.is_last_pp_rank:
            from sipipe.worker.hooks.torch_rows import TorchRows

            self._draws = TorchRows(around.runner, slots=boot.watched.inflight, **told)
        if self._logits is not None:
            self._device.unlock_pages(self._logits.buffer)
            self._logits.close()
            self._logits = None

    # ---- iterations -----------------------------------------------------------------------------

    @property
    def double_buffer(self) -> DoubleBuffer | None:
        """The stage's two threads, once iterations can run."""
        return self.running.double_buffer

    def call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, with no iteration in the worker; in the device thread, if any."""

        def alone() -> Any:
            self.running.drain()
            return function()

        double_buffer = self.double_buffer
        return alone() if double_buffer is None else double_buffer.call(alone)

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        return self.running.doing()

    def close(self) -> None:
        """End the threads; release links and channels."""
        self.running.close()
        self._links.close()
        self._projection.close()
        self._ends.close()
        if self._logits is not None:
            self._logits.close()
