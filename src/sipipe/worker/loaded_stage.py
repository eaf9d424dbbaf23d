"""A stage whose model is loaded: the engine's calls, before its first iteration and after it.

The stage describes what it writes, measures its parts, and takes its share of the output projection.
Then its channels are opened, and :class:`~sipipe.worker.sampled_stage.SampledStage` runs iterations.

Who runs here: the thread that follows BIC-I, in control calls with no iteration in the worker, and
to hand iterations over.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config

from sipipe.core_binding import bind_threads, run_soon
from sipipe.ipc.link.cuda_device import gpu_name
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.ipc.link.schema import TensorSchema, buffer_bytes
from sipipe.messages import calls
from sipipe.messages.link import buffer_tokens
from sipipe.messages.logits import LogitsShape
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import StageDescription, WorkerBoot
from sipipe.worker.agreement import comparison
from sipipe.worker.device import Device, HostDevice
from sipipe.worker.hooks.draws import LastRows, NothingDrawn, Pooled, WholeBatch, feedback_of
from sipipe.worker.hooks.prompt_adapters import score_prompts_by_adapters
from sipipe.worker.inputs.buffers import PackedInputBuffers
from sipipe.worker.links import LinkEnds, Links, NoEnd
from sipipe.worker.measure import measure_stage
from sipipe.worker.projection.logits import LogitsHandover, StageLogits
from sipipe.worker.projection.share import ProjectionShare
from sipipe.worker.sampled_stage import ClosedStage, SampledStage, Surroundings

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer


def link_bytes(runner: Any, boot: WorkerBoot) -> int:
    """Bytes that links from other stages take of this rank's GPU, by any transport. By way of host
    memory torch's allocator holds as much for what arrives and what is in use."""
    schema = taken_schema(runner)
    if schema is None or runner.device.type == "cpu":
        return 0
    tokens = buffer_tokens(runner.max_num_reqs, runner.max_num_tokens)
    return max(2, boot.watched.inflight) * buffer_bytes(schema, tokens)


def taken_schema(runner: Any) -> TensorSchema | None:
    """Schema of the hidden states that the runner takes from the stage before; None on the first."""
    buffers = getattr(runner, "intermediate_tensors", None)
    if buffers is None:
        return None
    return TensorSchema.capture(buffers.tensors, runner.max_num_tokens)


class LoadedStage:
    """The stage of one worker, whose surroundings are ``around``. It is made before vLLM warms its
    runner up, because it may replace the runner's sampling. ``sockets`` are those of the links that
    its start record lists."""

    def __init__(self, around: Surroundings, sockets: Sequence[socket.socket]) -> None:
        self._around = around
        pairs = zip(around.boot.links, sockets, strict=True)
        self._ends = LinkEnds(around.boot.place, pairs, around.fail)
        self._bound = False
        self._links = Links(around.boot.place, NoEnd(), NoEnd())
        self.running: SampledStage | ClosedStage = ClosedStage()
        boot = around.boot
        worker = around.worker
        runner = around.runner
        self._device: Device
        self.sharing: ProjectionShare
        self._device, self.sharing = worker.parts(boot)
        if not isinstance(self._device, HostDevice):
            # Before graphs are captured, which hold the buffers' addresses.
            runner.input_buffers = PackedInputBuffers(
                runner.max_num_reqs, runner.max_num_tokens, boot.rows, runner.device
            )
        self._draws = NothingDrawn()
        if runner.is_last_pp_rank and not runner.is_pooling_model:
            logits = StageLogits(runner)
            self._draws = LastRows(runner, self._device, logits, reports=around.reports)
            if runner.lora_config is not None:
                score_prompts_by_adapters(runner)
        self._projection = self._draws.projection
        self._logits: LogitsHandover | None = None
        """This rank's writer of BIC-L, if it is one."""
        if boot.path == "sipipe" and not boot.measures:
            self._take_over(boot.config.cpu_sampling)
        # vLLM must not give these bytes of the GPU to the KV cache.
        worker.reserved = link_bytes(runner, boot) + self.sharing.device_bytes()

    # ---- control calls --------------------------------------------------------------------------

    def answer(self, request: calls.Request[Any]) -> Any:
        """Answer a request of the engine."""
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
                return self._begin_drawing(draws)
        raise AssertionError(f"nobody answers {request}")

    def describe(self) -> StageDescription:
        """Describe what the engine has to know to make this rank's channels. The KV cache is set up by
        now."""
        around = self._around
        stage_logits = self._draws.stage_logits
        config = around.boot.vllm_config
        device = around.runner.device
        takes = taken_schema(around.runner)
        # The fields that every rank has.
        described = partial(
            StageDescription,
            takes=b"" if takes is None else takes.encode(),
            gpu=gpu_name(device.index or 0) if device.type == "cuda" else "",
            nixl=nixl_reach(),
        )
        if stage_logits is None:
            return described()
        with set_current_vllm_config(config):
            if config.lora_config is not None:
                # The projection looks for the adapters of a batch, and there is no batch yet.
                around.runner._set_active_loras((0,), (0,), set())
            model = config.model_config
            hidden = torch.randn(3, model.get_hidden_size(), dtype=model.dtype).to(device)
            with torch.inference_mode():
                logits = stage_logits.compute_first(hidden)
                offer = self.sharing.offer(stage_logits, hidden)
        if logits is None:
            return described(offer=offer)
        shape = LogitsShape(
            vocab=stage_logits.vocab_size if stage_logits.bounds else logits.shape[1],
            dtype=str(logits.dtype).removeprefix("torch."),
            # Every rank writes its columns; without bounds the first one writes gathered rows.
            bounds=stage_logits.bounds,
        )
        return described(logits=shape, offer=offer)

    def _measure(self, sequences: int) -> Measured:
        """Measure the parts of a microbatch, drawn on this device and by CPU samplers."""
        around = self._around
        with set_current_vllm_config(around.boot.vllm_config):
            return measure_stage(
                around.runner,
                self._device,
                sequences,
                self._draws.stage_logits,
                self._logits,
                speculator=around.worker.speculator,
            )

    def open(self, request: calls.OpenChannels) -> None:
        """Take the links, which have been tried, into use. Where samplers draw, open also this rank's
        writer of BIC-L and its links of final hidden states."""
        around = self._around
        sharing = self.sharing
        logits = request.logits
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

    def _begin_drawing(self, draws: str) -> None:
        """Begin with the place of drawing that was measured to be best, in the words of
        ``cpu_sampling``. No iteration has run yet."""
        if draws == "off":
            self._draw_here()
        else:
            self._take_over(draws)
        self._begin()

    def _begin(self) -> None:
        """Have iterations run from now on."""
        self.running = SampledStage(
            self._around,
            self._links,
            self._device,
            self._draws,
            self._projection,
            self._logits,
        )

    def _take_over(self, draws: str) -> None:
        """Have CPU samplers draw from now on, ``"on"`` or ``"per_row"``."""
        self._around.worker.feedback = feedback_of(self._around.runner, draws=True)
        self._draws = self._draws.take_over(per_row=draws == "per_row")

    def _draw_here(self) -> None:
        """Have vLLM's own sampler draw from now on. Nobody reads logits then."""
        runner = self._around.runner
        boot = self._around.boot
        reports = self._around.reports
        stall_timeout = boot.config.stall_timeout
        if runner.is_pooling_model:
            self._draws = Pooled(reports=reports, stall_timeout=stall_timeout)
        elif self._around.worker.speculator is not None:
            from sipipe.worker.hooks.drafting_batch import DraftingBatch

            self._draws = DraftingBatch(
                runner,
                self._around.worker.speculator,
                reports=reports,
                stall_timeout=stall_timeout,
                compare=comparison(boot.place, stall_timeout),
            )
        elif runner.is_last_pp_rank and boot.sampler_kernels:
            self._draws = WholeBatch(reports=reports, stall_timeout=stall_timeout)
        elif runner.is_last_pp_rank:
            from sipipe.worker.hooks.torch_rows import TorchRows

            self._draws = TorchRows(
                runner,
                slots=boot.watched.inflight,
                reports=reports,
                stall_timeout=stall_timeout,
            )
        if boot.head is not None:
            self._draws.decode_tokens = 1 + boot.head.num_speculative_tokens
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
        """Call ``function`` with no iteration in the worker, in the device thread once there is one, and
        return its result."""

        def drain_and_call() -> Any:
            self.running.drain()
            return function()

        double_buffer = self.double_buffer
        if double_buffer is None:
            return drain_and_call()
        return double_buffer.call(drain_and_call)

    def doing(self) -> str:
        """Predicates on the threads that run iterations, for the report of a stall."""
        return self.running.doing()

    def close(self) -> None:
        """End the threads; release links and channels."""
        self.running.close()
        self._links.close()
        self._projection.close()
        self._ends.close()
        if self._logits is not None:
            self._logits.close()
