"""Comparison of an engine's stages with all layers in one stage, when it first starts.

A model of vLLM that is wrong in stages says nothing: its answers are. So the first start of a model
whose family is not verified (:mod:`sipipe.engine.self_test.families`) answers some short prompts twice:
in one stage that has all layers, by stock vLLM in a process of its own
(:mod:`sipipe.engine.self_test.reference`), before the workers take memory; and through the stages, as
requests are answered, when they are ready.

Who runs here: the engine thread, in vLLM's start.
Guarantees: only a comparison that fails ends the start. Whatever else goes wrong, or would take too
    much memory or time, is a line in the log that says why there was none. What has been found is
    kept (:mod:`sipipe.engine.self_test.kept`); a failure is not, as the next start may differ.
Rejected: a pass of each worker by a control call, which would be a second way to run a stage, and
    compare what no request meets. Rejected: the process beside the workers, which would need the
    memory of both at once. Rejected: all prompts in one batch, and one rank beside several, since some
    of vLLM's kernels then compute something else (MLA on CPUs).
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import cloudpickle
import torch
import vllm
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from sipipe._version import __version__
from sipipe.engine.self_test import kept
from sipipe.engine.self_test.difference import bound, difference
from sipipe.engine.self_test.families import implementation_of, is_verified
from sipipe.engine.self_test.kept import Finding, Subject
from sipipe.engine.self_test.prompts import TOKENS, Reference, answer, make_requests
from sipipe.engine.self_test.reference import KV_BYTES
from sipipe.engine.self_test.scheduler import make_scheduler
from sipipe.engine.setup.checkpoint import FILES, weight_bytes
from sipipe.engine.setup.record import Setup
from sipipe.errors import UnsupportedError
from sipipe.ipc.child import import_path, limit_waits, start_child
from sipipe.ipc.memory import free_bytes
from sipipe.kept import digest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput

    from sipipe.engine.self_test.prompts import Answers

    Run = Callable[[SchedulerOutput], ModelRunnerOutput]

logger = init_logger(f"vllm.{__name__}")

PROGRAM = ("-m", "sipipe.engine.self_test.reference")
PROCESS_BYTES = 2 << 30
"""Bytes that the process takes beside weights and KV cache: vLLM's imports, activations, scores."""
SHARE_OF_START = 0.25
"""Part of ``start_timeout`` that the process may take: a start that it delays is still in time."""
PIPE_SECONDS = 10
"""Seconds for which the process may stop amid a message."""
LEAVE_SECONDS = 10.0
"""Seconds that the process has to end once it has answered."""


class _NotComparedError(Exception):
    """Why the stages were not compared with one stage. ``kept``: it took time to find out, and would
    again."""

    def __init__(self, why: str, *, kept: bool = False) -> None:
        super().__init__(why)
        self.kept = kept


class SelfTest:
    """The self-test of one start, in two steps: :meth:`begin` before workers are started, and
    :meth:`compare` when they are ready."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = setup.vllm_config.model_config
        self._name = next(iter(self._model.architectures or ()), "this model")
        self._verified = False
        self._reference: Reference | None = None

    def begin(self) -> None:
        """Compute the answers of one stage, where the model is to be compared and can be."""
        setting = self._setup.config.self_test
        if self._setup.stages == 1 or setting == "off":
            return
        try:
            self._verified = is_verified(self._model)
            if setting == "auto":
                if self._verified:
                    return
                finding = kept.load(self._subject())
                if finding is not None:
                    self._say_kept(finding)
                    return
            self._check_possible()
            self._reference = self._compute()
        except Exception as error:
            self._say_not_compared(error)

    def compare(self, run: Run, kv_caches: Sequence[KVCacheConfig]) -> None:
        """Compare with the stages' answers. ``run``: the result of one scheduling output, through
        the stages. ``kv_caches``: of the workers. Raises UnsupportedError: stages answer otherwise."""
        reference = self._reference
        self._reference = None
        if reference is None:
            return
        try:
            stages = self._of_stages(reference.prompts, run, kv_caches)
            apart = difference(stages, reference.answers)
        except Exception as error:
            self._say_not_compared(error)
            return
        most = bound(self._setup.dtype)
        if not apart <= most:
            raise UnsupportedError(
                f"{self._name}: with {self._setup.stages} stages its answers are not those of one "
                f"stage: the scores of tokens differ by {apart:.0%}, and rounding in "
                f"{self._setup.dtype} explains {most:.0%}: serve it with --pipeline-parallel-size 1, "
                'or, to serve it all the same, set "self_test": "off" in the sipipe config'
            )
        remark = self._keep(difference=apart)
        logger.info(
            "Self-test of %s: %d stages answer as one stage does (scores differ by %.2g, at most "
            "%g by rounding)%s",
            self._name,
            self._setup.stages,
            apart,
            most,
            remark,
        )

    # ---- one stage ------------------------------------------------------------------------------

    def _check_possible(self) -> None:
        """Raises _NotComparedError: this engine cannot be compared, or not here."""
        config = self._setup.vllm_config
        load_format = str(config.load_config.load_format)
        if not current_platform.is_cpu():
            raise _NotComparedError("the self-test is for engines on CPUs")
        if self._model.runner_type == "pooling":
            raise _NotComparedError("it is served for pooling, and has no tokens to compare")
        if self._setup.config.hosts.count > 1 or config.parallel_config.placement_group is not None:
            raise _NotComparedError("the stages are on several hosts, or placed by Ray")
        if config.parallel_config.data_parallel_index > 0:
            raise _NotComparedError("replica 0 is compared")
        if config.kv_transfer_config is not None:
            raise _NotComparedError("a KV connector would take its prompts for requests")
        if self._model.skip_tokenizer_init:
            raise _NotComparedError("there is no tokenizer (--skip-tokenizer-init)")
        if self._model.max_model_len <= TOKENS:
            raise _NotComparedError(f"requests have {self._model.max_model_len} tokens at most")
        if load_format not in FILES:
            raise _NotComparedError(f"its weights are loaded by --load-format {load_format}")
        weights = weight_bytes(self._model, config.load_config)
        if not weights:
            raise _NotComparedError("its weights are not on this machine yet")
        # Files of 16 bits become twice as large in float32.
        needed = weights * max(1, self._model.dtype.itemsize // 2)
        needed += self._setup.ranks * (KV_BYTES + PROCESS_BYTES)
        if needed > (room := free_bytes()):
            raise _NotComparedError(
                f"all layers in one stage take about {needed / 2**30:.1f} GiB, and "
                f"{room / 2**30:.1f} GiB are free"
            )

    def _compute(self) -> Reference:
        """Answers of one stage; its process has ended when this returns."""
        seconds = self._setup.config.start_timeout * SHARE_OF_START
        logger.info(
            "%s: this start compares its stages with all layers in one stage (at most %.0f s more)",
            self._who(),
            seconds,
        )
        # What stock vLLM says of itself is not about this engine.
        output = None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
        process, control = start_child(
            PROGRAM,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        limit_waits(control, PIPE_SECONDS)
        pipe = Connection(control.detach())
        try:
            with suppress(OSError):  # its end is what is heard then
                # wait: 10 s (`PIPE_SECONDS`); the process, which reads before all else, or its death
                pipe.send_bytes(cloudpickle.dumps(self._setup.vllm_config))
            # wait: a quarter of `start_timeout`; the process's answer or end
            if not pipe.poll(seconds):
                raise _NotComparedError(
                    f"one stage with all layers took more than {seconds:.0f} s (a quarter of "
                    '"start_timeout")',
                    kept=True,
                )
            # wait: 10 s (`PIPE_SECONDS`) for the rest of its answer; the process, or its death
            reply = pipe.recv()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)  # wait: 10 s, then it is killed; the process's end
        except BlockingIOError:
            raise _NotComparedError("the process with all layers has stopped", kept=True) from None
        except (EOFError, OSError):  # a reset, where it has not read all
            raise _NotComparedError("the process with all layers has ended", kept=True) from None
        finally:
            pipe.close()
            process.kill()
            process.wait()  # wait: none, it is killed; its end
        if isinstance(reply, str):
            raise _NotComparedError(f"one stage cannot answer: {reply}", kept=True)
        assert isinstance(reply, Reference)
        return reply

    # ---- the stages -----------------------------------------------------------------------------

    def _of_stages(
        self, prompts: Sequence[Sequence[int]], run: Run, kv_caches: Sequence[KVCacheConfig]
    ) -> Answers:
        """Answers through the stages, by a scheduler of vLLM's that lives for this alone."""
        scheduler = make_scheduler(self._setup.vllm_config, kv_caches)

        def step() -> Iterable[EngineCoreOutputs]:
            output = scheduler.schedule()
            results: dict[int, EngineCoreOutputs] = scheduler.update_from_output(
                output, run(output)
            )
            return results.values()

        try:
            vocabulary = self._model.get_vocab_size()
            return answer(make_requests(prompts), vocabulary, scheduler.add_request, step)
        finally:
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            run(scheduler.schedule())  # which tells stages and samplers that they have ended
            scheduler.shutdown()

    # ---- findings -------------------------------------------------------------------------------

    def _subject(self) -> Subject:
        config = self._setup.vllm_config
        return Subject(
            architecture=self._name,
            implementation=implementation_of(self._model),
            model_config=digest(self._model.hf_config.to_dict()),
            layers=self._setup.layers,
            ranks=self._setup.ranks,
            dtype=self._setup.dtype,
            quantization=str(self._model.quantization or ""),
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            compiled=config.compilation_config.mode != CompilationMode.NONE,
            vllm=vllm.__version__,
            sipipe=__version__,
            torch=str(torch.__version__),
        )

    def _say_kept(self, finding: Finding) -> None:
        if finding.why:
            self._warn(
                f'{finding.why} (found at an earlier start; "self_test": "always" asks again)'
            )
        else:
            logger.info("Self-test of %s: it has passed at an earlier start", self._name)

    def _say_not_compared(self, error: Exception) -> None:
        if isinstance(error, _NotComparedError):
            why = str(error)
            if error.kept:
                why += self._keep(why=why)
        else:
            why = f"{type(error).__name__}: {error}"
            logger.debug("the self-test failed here", exc_info=error)
        self._warn(why)

    def _warn(self, why: str) -> None:
        logger.warning(
            "%s: its %d stages have not been compared with one stage: %s",
            self._who(),
            self._setup.stages,
            why,
        )

    def _who(self) -> str:
        """The model, and what is known of its family."""
        if self._verified:
            return self._name
        return f"{self._name} is not among the verified model families (docs/compatibility.md)"

    def _keep(self, *, difference: float | None = None, why: str = "") -> str:
        """Keep a finding for later starts; returns a remark where that cannot be."""
        try:
            kept.keep(Finding(subject=self._subject(), difference=difference, why=why))
        except Exception as error:
            return f"; it could not be kept for the next start ({error})"
        return ""


def _environment() -> dict[str, str]:
    """Environment of the process: one of stock vLLM's, without what concerns stages and ranks."""
    left_out = {"VLLM_PP_LAYER_PARTITION", "VLLM_USE_V2_MODEL_RUNNER"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **inherited,
        "PYTHONPATH": import_path(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
