"""The ``vllm.general_plugins`` entry point: what vLLM runs in each of its processes.

It adds SiPipe's figures to ``/metrics`` (a collector that says nothing where no SiPipe engine
runs), and two hooks. ``EngineArgs`` resolves our executor's name to the class first, because vLLM
refuses a custom executor given by name together with pipeline parallelism (it asks the name for
``supports_pp``), and makes the configuration in a class of ours, which knows what vLLM's runner and
the number of microbatches will be. And vLLM's server answers a request that fails with "Internal
server error", whatever the reason; :func:`tell_clients_why` has it say the reason. Nothing else of
vLLM is touched, and nothing happens to engines that do not ask for SiPipe.
"""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sipipe.errors import SiPipeError, tell
from sipipe.versions import require_vllm

EXECUTOR_NAMES = frozenset(
    {"sipipe", "sipipe.Executor", "sipipe.vllm.Executor", "sipipe.engine.executor.Executor"}
)


def register() -> None:
    """Called by vLLM, possibly several times in a process."""
    from vllm.engine import arg_utils

    from sipipe.observe import metrics

    metrics.register()
    create = arg_utils.EngineArgs.create_engine_config
    if getattr(create, "__sipipe__", False):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = self.distributed_executor_backend
        named = isinstance(backend, str) and backend in EXECUTOR_NAMES
        if not named and getattr(backend, "__module__", "") != "sipipe.engine.executor":
            return create(self, *args, **kwargs)
        with _one_line():
            require_vllm()  # where this is another vLLM
            from sipipe.config import SiPipeConfig
            from sipipe.engine.compatibility import check_features, check_stages, device_may_draw
            from sipipe.engine.executor import Executor
            from sipipe.engine.setup import PipelineVllmConfig
            from sipipe.engine.speculation import fill_in

            # Options and features are checked here too, in the process that the user sees.
            SiPipeConfig.from_additional_config(self.additional_config)
            tell_clients_why()
            say_cause_once()
            if named:
                self.distributed_executor_backend = Executor
            fill_in(self)
            with patch.object(arg_utils, "VllmConfig", PipelineVllmConfig):
                made = create(self, *args, **kwargs)
            check_features(made)
            check_stages(made)
            if made.model_config.logits_processors and not device_may_draw():
                take_first_processors()
            if made.speculative_config is not None:
                take_every_parameter()
            return made

    create_engine_config.__sipipe__ = True  # type: ignore[attr-defined]
    arg_utils.EngineArgs.create_engine_config = create_engine_config


@contextmanager
def _one_line() -> Iterator[None]:
    """What SiPipe refuses ends a command of vLLM's as it ends ``sipipe serve``: with one line and
    that error's status. In Python it is an exception."""
    try:
        yield
    except SiPipeError as error:
        if not _is_vllms_command():
            raise
        tell(error)
        sys.exit(error.status)


def _is_vllms_command() -> bool:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec else Path(getattr(main, "__file__", None) or "").name
    return name.partition(".")[0] == "vllm"


def say_cause_once() -> None:
    """Under ``vllm serve``: an engine that could not start has said why. vLLM's front end would add
    how it came to wait for it."""
    shown = sys.excepthook

    def show(kind: Any, error: Any, where: Any) -> None:
        if "See root cause above" in str(error):
            tell(error)
        else:
            shown(kind, error, where)

    if _is_vllms_command():
        sys.excepthook = show


def take_first_processors() -> None:
    """Have vLLM's front end look at custom logits processors as those of its PyTorch sampler
    (:mod:`sipipe.worker.torch_rows`), though the runner is the second one."""
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample import logits_processor

    logits_processor.build_custom_logits_processors_params_validator = lambda processors: partial(
        validate_logits_processors_parameters, processors
    )


def take_every_parameter() -> None:
    """Have vLLM's front end take requests with a min-p or a logit bias though drafts are verified,
    which vLLM's rejection sampler cannot for them; SiPipe's samplers can."""
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = lambda *_: None


def tell_clients_why() -> None:
    """Have ``AsyncLLM.generate`` raise why a request failed, as it raises what is wrong with one.

    The scheduler puts the reason where vLLM has that of a stop (``ObservedScheduler``); the server
    looks at the finish reason only, unless it is raised.
    """
    from vllm.exceptions import GenerationError
    from vllm.v1.engine.async_llm import AsyncLLM

    generate = AsyncLLM.generate
    if getattr(generate, "__sipipe__", False):
        return

    @wraps(generate)
    async def generate_or_raise(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(generate(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                for sequence in output.outputs:
                    if sequence.finish_reason == "error" and sequence.stop_reason:
                        raise GenerationError(sequence.stop_reason)
                yield output

    generate_or_raise.__sipipe__ = True  # type: ignore[attr-defined]
    AsyncLLM.generate = generate_or_raise
