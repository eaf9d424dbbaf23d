"""SiPipe's worker classes: vLLM's own, in a world of their stage.

They differ from vLLM's in how torch.distributed and the model-parallel groups are set up, and in what
stands for parts of its second runner (:mod:`sipipe.worker.hooks.draws`).

vLLM's CPU build writes its cache of compiled models at every start, and never reads it: it finishes what
it loads by a method of its own backend's functions. On CPUs torch's inductor is the backend, whose
functions need no finishing and lack the method, so each worker would compile anew. :func:`use_compiled`
mends that.

Who runs here: the worker's main thread, while the stage is made and loaded; then the device thread.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import stat
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._inductor import config as inductor
from torch.overrides import TorchFunctionMode
from vllm import envs
from vllm.config import CompilationMode, VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils import cpu_resource_utils
from vllm.v1.worker import gpu_worker

from sipipe.ipc.memory import group_limit, group_used
from sipipe.worker.hooks.kernel_dtypes import check_dtypes
from sipipe.worker.hooks.native_launch import (
    FROM_PYTHON,
    NATIVE,
    compiles_natively,
    may_launch_natively,
)
from sipipe.worker.hooks.stage_tensors import hand_on
from sipipe.worker.hooks.world import stage_world

if TYPE_CHECKING:
    from sipipe.messages.start_records import WorkerBoot
    from sipipe.worker.device import Device
    from sipipe.worker.hooks.preparation import TokenFeedback
    from sipipe.worker.projection.share import ProjectionShare

logger = init_logger(f"vllm.{__name__}")

FEW_TOKENS = 16
"""Tokens of a pass that only loads a compiled model."""


class _StageWorker:
    """Mixed into a vLLM worker class, before it in the method resolution order."""

    vllm_module: ModuleType
    """Module that defines vLLM's class."""
    model_runner: Any
    vllm_config: VllmConfig
    boot: WorkerBoot
    """Record from which the process has started. It sets it before ``init_device``."""
    feedback: TokenFeedback | None = None
    """Handler that brings a second runner its tokens."""
    speculator: Any = None
    """vLLM's speculator of a draft head; None without one, and on all stages but the last."""

    def init_device(self) -> None:
        """Join the stage's world, and make the runner with SiPipe's parts in it."""
        with stage_world(self.boot.place, self.vllm_module), self._stand_ins():
            super().init_device()  # type: ignore[misc]
        if self.boot.head is not None:
            # vLLM would tap the model's layers while it loads them. `tap_layers` does, on every stage.
            self.model_runner.use_aux_hidden_state_outputs = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the stage's layers, and mend or check what of vLLM's model does not suit a stage."""
        if self.boot.head is not None:
            name_taps(self.vllm_config, self.boot.head)
        with self._stand_ins():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self.model_runner
        if self.boot.head is not None:
            self._load_head(runner, self.boot.head)
        check_dtypes(runner)
        hand_on(runner)
        # For a warm-up's steps, until the links are open.
        group: Any = get_pp_group()
        group.receive = lambda: runner.intermediate_tensors.tensors
        group.send = lambda _: lambda: None
        from sipipe.worker.hooks.draws import feedback_of

        self.feedback = feedback_of(runner, draws=self.boot.draws)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Lay the KV cache out, with the draft head's layers and a connector that reports failures."""
        from sipipe.worker.hooks.kv_connector import reporting

        with reporting(), self._hosted():
            super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one iteration, as vLLM's. Its tokens are in the scheduling output, and so is metadata of
        earlier outputs that this worker did not get."""
        if self.feedback is not None:
            self.feedback.output = scheduler_output
        for metadata in getattr(scheduler_output, "earlier_aux_metadata", ()):
            self.model_runner.aux_output_connector.begin_step(metadata)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _load_head(self, runner: Any, head: Any) -> None:
        """Load the draft head of vLLM's ``SpeculativeConfig`` on the last stage, and have each stage give
        what it reads."""
        from sipipe.worker.hooks.drafting_batch import hold_back, let_speculate
        from sipipe.worker.hooks.head import load_speculator, reads_several_layers, tap_layers

        if reads_several_layers(head):
            tap_layers(runner, head)
        if not runner.is_last_pp_rank:
            return
        self.speculator = load_speculator(runner, head)
        if self.boot.proposes:
            let_speculate(runner, self.speculator)
        elif runner.num_speculative_steps:  # who draws is measured
            hold_back(runner)

    def _hosted(self) -> AbstractContextManager[None]:
        """While active, the runner knows the stage's draft head, if it has one."""
        if self.speculator is self.model_runner.speculator:
            return nullcontext()
        from sipipe.worker.hooks.head import hosted

        return hosted(self.model_runner, self.speculator)

    def parts(self, boot: WorkerBoot) -> tuple[Device, ProjectionShare]:
        """The loaded stage's device, and its part of the output projection."""
        from sipipe.worker.device import stage_device
        from sipipe.worker.projection.share import ProjectionShare

        device = stage_device(self.model_runner.device)
        return device, ProjectionShare(boot, self, device)

    def _stand_ins(self) -> AbstractContextManager[None]:
        """While active, vLLM takes SiPipe's parts for its runner's own."""
        from sipipe.worker.hooks.draws import stand_ins

        return stand_ins(own_sampler=self.boot.own_sampler)


MOST_WRITTEN = 1 << 20
"""Bytes of zeros that are written as usual: a KV cache has many more, and nothing else as many."""


class _UntouchedZeros(TorchFunctionMode):
    """While active, ``torch.zeros`` of many bytes, which is a KV cache, are pages that the kernel
    gives, with zeros, when each is first used: a start need not write them all."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        size = args[0] if func is torch.zeros and kwargs.get("dtype") is torch.int8 else 0
        if not isinstance(size, int) or size < MOST_WRITTEN:
            return func(*args, **kwargs)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.int8)


class GPUStageWorker(_StageWorker, gpu_worker.Worker):
    """One tensor-parallel rank of a stage on a CUDA device."""

    vllm_module = gpu_worker
    reserved = 0
    """Bytes of the device that links from other stages and a shared projection's part will take."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, less those that are reserved; a size that the user gave is left alone."""
        # Read before vLLM is asked, which may set the size of an earlier start.
        users_size = self.cache_config.kv_cache_memory_bytes
        with self._hosted():
            available: int = super().determine_available_memory()
        if users_size or not self.reserved:
            return available
        logger.info(
            "links from other stages and a shared output projection: %.2f GiB of this GPU, taken "
            "off the KV cache",
            self.reserved / 2**30,
        )
        return available - self.reserved


# Not elsewhere: to import vLLM's CPU worker replaces torch's CUDA streams, events and memory
# figures by stand-ins, in the whole process.
if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker

    # What torch compiles for GPUs are Triton's files, which it renames.
    from sipipe.worker.hooks.whole_builds import build_whole_files

    class CPUStageWorker(_StageWorker, cpu_worker.CPUWorker):
        """One tensor-parallel rank of a stage on CPU cores."""

        vllm_module = cpu_worker
        _natively: bool = False
        """True if the launching of passes is to be compiled, too; set while the model is loaded."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Memory is counted as the engine does (:mod:`sipipe.engine.setup.kv_memory`): else vLLM
            # refuses the size that the engine has chosen.
            cpu_resource_utils.get_cgroup_memory_limit = group_limit
            cpu_resource_utils.get_cgroup_memory_usage = group_used
            # vLLM 0.33 refuses its second runner without Triton, whose kernels SiPipe has for CPUs.
            with patch.object(gpu_worker, "HAS_TRITON", True, create=True):
                super().__init__(*args, **kwargs)

        def init_device(self) -> None:
            from sipipe.worker.cpu_kernels.launch import install

            install()
            super().init_device()

        def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
            with _UntouchedZeros():
                super().initialize_from_config(*args, **kwargs)
            if self.model_runner.kv_block_zeroer is None:
                # The scheduler has blocks zeroed once a request has failed.
                self.model_runner._init_kv_zero_meta()

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            compiles = self.vllm_config.compilation_config.mode != CompilationMode.NONE
            self._natively = may_launch_natively(self.boot.place.stages, compiles=compiles)
            use_compiled(self.vllm_config, natively=self._natively)
            build_whole_files()
            # vLLM 0.33 compiles its kernels before the first request; ours need no compiling.
            self.vllm_config.kernel_config.enable_jit_warmup &= HAS_TRITON
            super().load_model(*args, **kwargs)

        def _should_warm_up_model(self) -> bool:
            """Say False where a pass of a few tokens has loaded the compiled model from disk, and where
            another pass has compiled it (:mod:`sipipe.worker.hooks.native_launch`).

            vLLM's own pass has as many tokens as a batch can, and takes seconds. It also measures memory,
            so it is made where the KV cache has no size yet. It is made too where there are several
            ranks, which have to do the same and do not know what each has cached, and where there is an
            encoder, which the short pass would not run.
            """
            needed: bool = super()._should_warm_up_model()
            if not (needed and self._may_load_compiled()):
                return needed
            ways = (NATIVE, FROM_PYTHON) if self._natively else (FROM_PYTHON,)
            if any(map(self._loads_compiled, ways)):
                return False
            return not (self._natively and compiles_natively(self.model_runner.warming_up_model))

        def _may_load_compiled(self) -> bool:
            """Say if a short pass can take the place of vLLM's."""
            cached = envs.VLLM_USE_AOT_COMPILE and not envs.VLLM_DISABLE_COMPILE_CACHE
            sized = self.cache_config.kv_cache_memory_bytes is not None
            only_rank = get_world_group().world_size == 1
            return bool(cached and sized and only_rank and not self.model_runner.supports_mm_inputs)

        def _loads_compiled(self, options: dict[str, Any]) -> bool:
            """Make a pass of a few tokens that loads what was compiled with these ``options`` of torch's
            inductor; False: there is none to load."""
            runner = self.model_runner
            tokens = min(FEW_TOKENS, runner.max_num_tokens)
            with (
                suppress(Exception),  # a pass compiles then
                inductor.patch(options),  # vLLM's name of the file has all of them
                patch.object(runner, "max_num_tokens", tokens),
                patch.object(envs, "VLLM_FORCE_AOT_LOAD", True),
            ):
                runner.warming_up_model()
                return True
            return False


def name_taps(config: VllmConfig, head: Any) -> None:
    """Have this process load no compiled model that gives other hidden states than ``head`` reads.

    vLLM names the file by its whole configuration. Most workers' has no drafts in it, so what they have to
    do with the compiled model becomes a part of it here.

    Args:
        head: vLLM's ``SpeculativeConfig``, whose hash has the layers that are tapped.
    """
    from sipipe.worker.hooks.head import reads_several_layers

    if reads_several_layers(head):
        config.additional_config = {**config.additional_config, "tapped_for": head.compute_hash()}


def use_compiled(config: VllmConfig, *, natively: bool) -> None:
    """Have this process load what was compiled for this model, these processor features and as many
    threads. Call once its threads are set.

    Compiled code has both built in, and torch compares neither, so they become a part of the
    configuration, from which vLLM names the file.

    Args:
        config: vLLM's configuration in this worker.
        natively: Whether the launching is compiled, too.
    """
    built_for = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), natively]
    config.additional_config = {**config.additional_config, "compiled_for": built_for}
    load = torch.compiler.load_compiled_function

    @functools.wraps(load)
    def finished(file: Any, *args: Any, **kwargs: Any) -> Any:
        # By the open file, which nobody can exchange any more: its contents are executed.
        state = os.fstat(file.fileno())
        if state.st_uid not in (os.geteuid(), 0) or state.st_mode & stat.S_IWOTH:
            # vLLM logs this, and compiles anew.
            raise PermissionError(errno.EPERM, "others can have written it", file.name)
        model = load(file, *args, **kwargs)
        function = model._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda _: None
        return model

    torch.compiler.load_compiled_function = finished
