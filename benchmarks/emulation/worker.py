"""A stage whose device only takes time, for ``python -m benchmarks.emulate``.

Scheduler, executor, channels, preparation, links, publisher and samplers are the engine's own, as on
a GPU; the worker's model and device are replaced. Batches are prepared ahead and copied from their
sets of input buffers as there: the host copies at once, and a set is free when the device's time has
come to its copies. Work on the device is a span of time that :mod:`benchmarks.emulation.profile` gives, so a
stream is the time at which it will be free and a mark the time at which it will be reached: nothing
computes, and no thread is needed for it. Hidden states have the model's shape and type, and are
copied as the links copy them; their first eight bytes are the time at which they will be there. The
places of the logits are filled once, and then published as they are; with a given acceptance of drafts
each row's token is drawn there. A draft head takes its time on the last stage's stream, and its drafts
are one of two tokens.

Where the output projection is shared out, a stage's product and its forward passes have streams of
their own, and one memory to read weights from: they run side by side, each at half its speed. Here a
product takes twice as long as alone, from the moment that its rows are there, and each forward pass
takes as much longer as the product of as many rows takes: there is one for every pass.

Who runs here: the device thread; ``wait`` is the preparing thread's and the publisher's, ``fetch``
the publisher's. The projection's thread, in :class:`_Beside`.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_pp_group, parallel_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from benchmarks.emulation.profile import Profile, read_profile
from benchmarks.emulation.runner import EmulatedRunner
from benchmarks.emulation.speculator import EmulatedSpeculator
from benchmarks.emulation.stock_costs import Costs
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import ProjectionOffer, WorkerBoot
from sipipe.worker.hooks.world import PipelineStandIn
from sipipe.worker.projection.share import ProjectionShare

_PATTERN = 1_000_003  # elements: no multiple of a vocabulary, so that rows differ
_LARGE = 100.0
"""A logit above all others."""
_HIDDEN = ("hidden_states", "residual")
"""What most of vLLM's models send to the next stage, and what a profile's hops are computed for."""


def _times(hidden: torch.Tensor) -> torch.Tensor:
    """[n], the first eight bytes of each row [n, H] as a time (monotonic ns)."""
    return hidden.view(torch.int64)[:, 0]


class EmulatedDevice:
    """A stream of work and one of copies, each the time (monotonic ns) at which it will be free.

    Args:
        profile: has the time of a copy.
        logits: their type.
        ready: its first element is when the hidden states that were received last will be there;
            the stream waits for them.
        vocabulary: columns of all logits.
    """

    def __init__(
        self, profile: Profile, logits: torch.dtype, ready: torch.Tensor, vocabulary: int
    ) -> None:
        self._profile = profile
        self._dtype = logits
        self._ready = ready
        self._vocabulary = vocabulary
        self._free = self._copied = 0
        # Tokens are one of two, independent of one another. A head's drafts are always the first one;
        # by a prompt lookup, two tokens are equal as often as a draft is to be right.
        self._likely = profile.acceptance
        if profile.head is None:
            self._likely = 0.5 + math.sqrt(max(0.0, 2 * profile.acceptance - 1)) / 2
        self._random = np.random.default_rng(0)

    def use(self) -> None:
        pass

    def beside(self) -> _Beside:
        return _Beside(self._profile, self._dtype, self._ready, self._vocabulary)

    def launch(self, seconds: float) -> None:
        """Work that takes ``seconds``, behind what was launched before."""
        self._free = self.mark() + round(seconds * 1e9)

    def mark(self) -> int:
        return max(self._free, time.monotonic_ns(), int(self._ready[0]))

    def occupy(self, seconds: float) -> None:
        """Its times are known, whoever launches."""

    def undisturbed(self) -> EmulatedDevice:
        return self

    def wait(self, mark: int) -> int:
        while (left := mark - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)  # wait: the emulated kernel's time; nobody
        return mark

    def nanoseconds(self, first: int, last: int) -> int:
        return last - first

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: int) -> int:
        began = max(self._copied, after, time.monotonic_ns())
        rows = source.numel() / self._vocabulary
        if self._profile.acceptance:
            first = torch.from_numpy(self._random.random(len(target)) < self._likely)
            target[:, 0], target[:, 1] = _LARGE * first, _LARGE * ~first
        self._copied = began + round(self._profile.copy(rows) * 1e9)
        return self._copied

    def unlock_pages(self, memory: memoryview) -> None:
        """Nothing was locked."""

    def lock_pages(self, memory: memoryview) -> None:
        """Fill all places of the logits."""
        pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
        tile = pattern.to(self._dtype).view(torch.uint8).numpy()
        flat = np.frombuffer(memory, np.uint8)
        for start in range(0, len(flat), len(tile)):
            flat[start : start + len(tile)] = tile[: len(flat) - start]


class _Beside(EmulatedDevice):
    """The stream of the projection's thread."""

    def compute(self, ready: int, seconds: float) -> None:
        """Work that takes ``seconds`` alone, once its rows are there. Returns when they are."""
        self.wait(ready)  # wait: the emulated last stage's time; nobody
        self._free = max(self._free, ready) + round(2 * seconds * 1e9)

    def beside(self) -> _Beside:
        return self

    def mark(self) -> int:
        return max(self._free, time.monotonic_ns())

    def nanoseconds(self, first: int, last: int) -> int:
        return 0


class _Projection(torch.nn.Module):
    """Logits of a true shape, which are nowhere: some columns of them, or all."""

    def __init__(
        self, device: EmulatedDevice, profile: Profile, whole: int, columns: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._device, self._profile = device, profile
        self._columns, self._share, self._dtype = columns, columns / whole, dtype

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """On the last stage, behind its layers."""
        self._device.launch(self.seconds(len(hidden)))
        return self._nowhere(len(hidden))

    def seconds(self, rows: int) -> float:
        return self._profile.stages[-1].projection(rows) * self._share

    def _nowhere(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._columns, dtype=self._dtype, device="meta")

    def multiply(self, hidden: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """As :meth:`ProjectionShard.multiply`."""
        return self.compute_logits(hidden)


class _ProjectionBeside(_Projection):
    """On another stage: in the rows is the time at which the last stage has made them."""

    def multiply(self, hidden: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(self._device, _Beside)
        rows = len(hidden)
        hop = max(stage.hop(rows) for stage in self._profile.stages)
        self._device.compute(int(_times(hidden)[0]) + round(hop * 1e9), self.seconds(rows))
        return self._nowhere(rows)


class EmulatedSharing(ProjectionShare):
    """There is no matrix whose rows could be taken, and times are in the profile."""

    def offer(self, *_: Any) -> ProjectionOffer | str:
        columns = (0, self._worker.model_config.get_vocab_size())
        if not self._boot.parts:
            return ""
        return ProjectionOffer(memory=None, columns=columns, hidden=1, scale=1.0, soft_cap=None)

    def time_parts(self, stage_logits: Any, sequences: int) -> Measured:
        stages = self._worker.profile.stages
        layers = stages[self._place.stage].layers(sequences)
        return Measured(layers=layers, projection=stages[-1].projection(sequences))

    def _take(self, offers: Sequence[ProjectionOffer], start: int, stop: int) -> Any:
        worker, device = self._worker, self._device
        assert isinstance(device, EmulatedDevice)
        whole, dtype = offers[0].columns[1], worker.model_config.dtype
        if self._place.is_last:
            return _Projection(device, worker.profile, whole, stop - start, dtype)
        self._device = device = device.beside()
        worker.beside = made = _ProjectionBeside(device, worker.profile, whole, stop - start, dtype)
        return made


class EmulatedWorker(WorkerBase):
    """One stage, whatever ranks it has: their time is in the profile."""

    use_v2_model_runner = True
    boot: WorkerBoot
    speculator: EmulatedSpeculator | None = None
    beside: _ProjectionBeside | None = None
    """This stage's part of the output projection, beside its forward passes."""

    def init_device(self) -> None:
        # vLLM makes it of processes alone, and its scheduler's side asks it for the stage.
        parallel_state._PP = PipelineStandIn(self.boot.place)  # noqa: SLF001
        self.device = torch.device("cpu")
        torch.set_num_threads(1)

    def load_model(self, *_: Any, **__: Any) -> None:
        profile = read_profile(os.environ["EMULATED_PROFILE"])
        self.profile, self._stage = profile, profile.stages[self.boot.place.stage]
        self._random = random.Random(self.boot.place.rank)
        dtype, width = self.model_config.dtype, self.model_config.get_hidden_size()
        tokens = self.scheduler_config.max_num_batched_tokens
        # What the forward pass has received, and what it has made.
        came, self._made = torch.zeros(2, tokens, width, dtype=dtype)
        self._sent: Callable[[], None] = lambda: None
        vocabulary = self.model_config.get_vocab_size()
        self.emulated = EmulatedDevice(profile, dtype, _times(came), vocabulary)
        self._costs = Costs(profile, self._stage, self.emulated)
        self._costs.open()
        self.model_runner: Any = EmulatedRunner(
            self.vllm_config,
            _Projection(self.emulated, profile, vocabulary, vocabulary, dtype),
            dict.fromkeys(_HIDDEN, came),
            last=self.boot.place.is_last,
        )
        if self.boot.head is not None and self.boot.place.is_last:
            assert profile.head is not None, "the profile is made for as many drafts"
            self.speculator = EmulatedSpeculator(
                self.vllm_config, self.boot.head, profile.head, self.emulated
            )

    def parts(self, boot: WorkerBoot) -> tuple[Any, ProjectionShare]:
        return self.emulated, EmulatedSharing(boot, self, self.emulated)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {f"stage{self.boot.place.stage}": self._cache()}

    def _cache(self) -> FullAttentionSpec:
        """For one layer of any shape: what counts is how many tokens fit."""
        size = self.cache_config.block_size
        return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.int8)

    def determine_available_memory(self) -> int:
        cache = self._cache()
        return int(self.profile.kv_tokens // cache.block_size * cache.page_size_bytes)

    def initialize_from_config(self, *_: Any) -> None:
        """There is no cache."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def update_max_model_len(self, length: int) -> None:
        self.model_config.max_model_len = length

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    def execute_model(self, output: SchedulerOutput) -> None:
        """Launch an iteration; as vLLM's worker, it receives and sends through the group."""
        group: Any = get_pp_group()
        self._sent()  # as vLLM's worker: what was made last may be overwritten
        begun = self.model_runner.begin(output)
        if begun is None:
            return
        batch, _ = begun
        computed, scheduled = batch.num_computed_tokens_np, batch.num_scheduled_tokens
        usual = self._stage.seconds(computed, scheduled)
        if self.beside is not None:
            samples = int((computed + scheduled >= batch.prefill_len_np).sum())
            usual += self.beside.seconds(samples)
        seconds = usual * max(0.0, self._random.gauss(1.0, self.profile.jitter))
        if not self.boot.place.is_first:
            group.receive()
            self._costs.before_pass()
        self.emulated.launch(seconds)  # at once: from here on the device is said to be busy
        if not self.boot.place.is_last:
            there = self.emulated.mark() + round(self._stage.hop(batch.num_tokens) * 1e9)
            _times(self._made)[0] = there
            self._sent = group.send(dict.fromkeys(_HIDDEN, self._made))
            self._costs.after_pass()
            return
        # What travels to other stages' parts of the projection, where they have any.
        hidden = self._made[: batch.num_tokens]
        _times(hidden)[batch.logits_indices] = self.emulated.mark()
        state = SimpleNamespace(input_batch=batch, hidden_states=hidden, aux_hidden_states=None)
        self.model_runner.execute_model_state = state

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = self.model_runner.sample_tokens(grammar_output)
        self._costs.after_pass()
        return output
