"""The ``vllm.general_plugins`` entry point, which vLLM calls in each of its processes.

It puts SiPipe's parts in the place of vLLM's that docs/upstream.md lists, and its figures into
``/metrics``, for SiPipe's engines alone: an engine of stock vLLM in the same process is left as it is.

Modules of vLLM are imported in functions here. This one is imported by every process of vLLM's, also
by those that have no engine of SiPipe's, and must cost them nothing.
"""

import difflib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from logging import getLogger
from multiprocessing import current_process, parent_process
from typing import Any
from unittest.mock import patch

from sipipe.engine.start.refusals import (
    check_given_once,
    checked,
    in_one_line,
    is_vllms_command,
)
from sipipe.environment import check_environment
from sipipe.errors import ConfigError
from sipipe.extending import extends
from sipipe.start_log import leave_out_what_is_wrong
from sipipe.versions import require_vllm

EXECUTOR_NAMES = frozenset({"sipipe", "sipipe.Executor", "sipipe.engine.executor.Executor"})
"""Names of SiPipe's executor that ``--distributed-executor-backend`` may have."""
SHUTDOWN_SECONDS = 7
"""Seconds that vLLM's server gives its processes to end: one less than its supervisor gives it."""

announced = False
"""True once a command of ours has checked and said how the engine of this process is set up."""


def register() -> None:
    """Put SiPipe's parts into vLLM's ``EngineArgs``. vLLM calls this, maybe several times in a process."""
    from vllm.engine.arg_utils import EngineArgs

    extends(EngineArgs, "create_engine_config")(_create)
    extends(EngineArgs, "__post_init__")(_begin)
    extends(EngineArgs, "from_cli_args")(_convert)


def _create(create: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the configuration of an engine; for one with SiPipe's executor it is checked, and decided on
    (:func:`sipipe.engine.setup.decide.decide`)."""
    from sipipe.config import STEPS_ASIDE
    from sipipe.engine.children.forking import fork_of_vllms
    from sipipe.engine.start.aside import leave_sipipe_out, steps_aside

    with in_one_line():
        if not asks_for_sipipe(arguments.distributed_executor_backend):
            return create(arguments, *args, **kwargs)
        if steps_aside(arguments):
            if current_process().name == "MainProcess":  # API servers make it again
                getLogger("vllm.sipipe").info("SiPipe: %s", STEPS_ASIDE)
            leave_sipipe_out(arguments)
            return create(arguments, *args, **kwargs)
        if is_vllms_command() and sys.argv[1:2] == ["serve"]:
            fork_of_vllms()
        stages_option = "-pp" if is_vllms_command() else "pipeline_parallel_size"
        vllm_config = engine_config(arguments, *args, stages=stages_option, **kwargs)
        _decide(vllm_config)
        return vllm_config


def _decide(vllm_config: Any) -> None:
    """Decide how the engine is set up, here, in the process that the user sees."""
    from sipipe.engine.setup.decide import decide

    vllm_config.announced = announced
    # Ray has the hosts, and the engine decides there. API servers come after the engines, which have
    # been decided on, and have taken memory.
    by_ray = vllm_config.parallel_config.placement_group is not None
    serves = current_process().name.startswith("ApiServer")
    by_command = announced and vllm_config.replicas == 1
    if by_ray or serves or by_command:
        return
    setup = decide(vllm_config)
    if not announced:
        check_setup(setup)
    if vllm_config.replicas > 1 and setup.kv_bytes is not None:
        # Each replica's share of the memory, while none of them has taken any.
        vllm_config.cache_config.kv_cache_memory_bytes = setup.kv_bytes


def _begin(begin: Callable[..., Any], arguments: Any) -> None:
    """Complete new engine arguments, after checks of the environment, and of the model where vLLM looks
    for it so early."""
    from huggingface_hub import constants

    from sipipe.engine.setup.checkpoint import check_model

    with in_one_line():
        ours = asks_for_sipipe(arguments.distributed_executor_backend)
        if ours:
            check_environment()  # every door makes these arguments first
        if not (constants.HF_HUB_OFFLINE and ours):
            begin(arguments)
            return
        check_model(arguments.model)
        checked(partial(begin, arguments), arguments.model)  # offline, vLLM looks for it here


def _convert(convert: Callable[..., Any], cls: type, args: Any) -> Any:
    """Convert parsed arguments, after checks of what the server meets half a minute later."""
    from sipipe.engine.setup.checkpoint import check_path
    from sipipe.engine.start.late_values import check_server

    with in_one_line():
        if asks_for_sipipe(getattr(args, "distributed_executor_backend", None)):
            if is_vllms_command():
                check_given_once(sys.argv)
            for adapter in getattr(args, "lora_modules", None) or ():
                # vLLM looks when the engine has started.
                path = os.path.expanduser(adapter.path)
                check_path(path, f"--lora-modules {adapter.name}")
            check_server(args)
    return convert(cls, args)


def asks_for_sipipe(backend: Any) -> bool:
    """Say if an engine with that ``--distributed-executor-backend``, a name or a class, is to have
    SiPipe's executor. Raises ConfigError: the name is nearly SiPipe's."""
    if not isinstance(backend, str):
        return getattr(backend, "__module__", "") == "sipipe.engine.executor"
    if backend in EXECUTOR_NAMES:
        return True
    package = backend.replace(":", ".").partition(".")[0]
    near = difflib.get_close_matches(package.lower()[:6], ["sipipe"], cutoff=0.8)
    if near and (package == "sipipe" or find_spec(package) is None):  # else it is another's
        raise ConfigError(
            f'--distributed-executor-backend "{backend}": there is no such executor; did you mean '
            "sipipe.Executor?"
        )
    return False


def engine_config(engine_args: Any, *args: Any, stages: str = "--pp", **kwargs: Any) -> Any:
    """The ``VllmConfig`` of an engine with our executor, checked in the process that the user sees.

    ``create_engine_config`` then decides how the engine is set up; commands of ours know more, and do
    it themselves. Raises ConfigError or UnsupportedError for what SiPipe or vLLM refuse.

    Args:
        engine_args: vLLM's ``EngineArgs``, which get the executor's class.
        stages: The option that the user has for the number of stages.
        args, kwargs: Arguments of vLLM's ``create_engine_config``.
    """
    require_vllm()  # where this is another vLLM
    leave_out_what_is_wrong()
    from sipipe.config import SiPipeConfig
    from sipipe.engine.setup.checkpoint import check_files
    from sipipe.engine.setup.compatibility import check_features, check_stages, schedules_ahead
    from sipipe.engine.start.late_values import check_engine

    SiPipeConfig.from_additional_config(engine_args.additional_config)
    _prepare_process()
    _check_arguments(engine_args, stages)
    ahead = engine_args.async_scheduling
    vllm_config = _made_by_vllm(engine_args, *args, **kwargs)
    vllm_config.replicas = vllm_config.parallel_config.data_parallel_size
    check_features(vllm_config)
    check_stages(vllm_config, stages)
    check_files(vllm_config)
    check_engine(vllm_config)
    vllm_config.ahead = schedules_ahead(vllm_config, ahead)
    _take_what_samplers_can(vllm_config)
    return vllm_config


def _prepare_process() -> None:
    """Put SiPipe's parts in the place of vLLM's in this process, which has or will have a front end of
    an engine. Each of them is safe to put there again."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml
    from vllm.v1.engine import utils
    from vllm.v1.utils import shutdown

    from sipipe.engine.start.drain import tell_left_over
    from sipipe.engine.start.ends import say_cause_last, watch_ends
    from sipipe.engine.start.failed_pooling import tell_failed_pooling
    from sipipe.engine.start.failed_requests import tell_clients_why
    from sipipe.engine.start.new_requests import check_new_requests
    from sipipe.engine.start.prompt_text import keep_prompts_text_out
    from sipipe.engine.start.sessions import end_turns_with_their_session
    from sipipe.engine.start.unanswered import end_unanswered_calls
    from sipipe.gpu_slices import find_gpus_of_slices
    from sipipe.observe import metrics

    find_gpus_of_slices(current_platform, import_pynvml)
    metrics.register()
    tell_clients_why()
    tell_failed_pooling()
    check_new_requests()
    end_turns_with_their_session()
    keep_prompts_text_out()
    tell_left_over()
    end_unanswered_calls()
    watch_ends()
    if is_vllms_command() and parent_process() is None:
        say_cause_last()
    # Without a timeout vLLM's server kills all, with a warning for each.
    utils.shutdown = lambda processes, timeout=None: shutdown(
        processes, timeout or SHUTDOWN_SECONDS
    )


def _check_arguments(engine_args: Any, stages: str) -> None:
    """Check what vLLM would refuse in other words, and fill in what it wants to be told."""
    from sipipe.engine.executor import Executor
    from sipipe.engine.setup.checkpoint import check_model, check_path
    from sipipe.engine.setup.speculative_config import fill_in

    engine_args.distributed_executor_backend = Executor
    # vLLM would name another option, that follows from this one.
    sequences = engine_args.max_num_seqs
    if sequences is not None and not (isinstance(sequences, int) and sequences > 0):
        raise ConfigError(f"--max-num-seqs must be a whole number of 1 or more, not {sequences!r}")
    count = engine_args.pipeline_parallel_size
    if not isinstance(count, int):
        raise ConfigError(f"{stages} must be a whole number of 1 or more, not {count!r}")
    head = fill_in(engine_args)
    if head:
        check_path(head, '--speculative-config "model"')
    check_model(engine_args.model)


def _made_by_vllm(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """The configuration as vLLM's own ``create_engine_config`` makes it, of SiPipe's class."""
    from vllm.engine import arg_utils

    from sipipe.engine.setup.vllm_config import PipelineVllmConfig

    create = arg_utils.EngineArgs.create_engine_config.__wrapped__
    with (
        patch.object(arg_utils, "VllmConfig", PipelineVllmConfig),
        patch.object(engine_args, "async_scheduling", False),  # vLLM's is for its own executors
    ):
        return checked(partial(create, engine_args, *args, **kwargs), engine_args.model)


def _take_what_samplers_can(vllm_config: Any) -> None:
    """Have vLLM's front end take requests that SiPipe's samplers can serve, and its own cannot."""
    from sipipe.engine.setup.compatibility import device_may_draw, installed_processors

    model = vllm_config.model_config
    processors = model.logits_processors or installed_processors()
    if processors and model.runner_type != "pooling" and not device_may_draw():
        take_first_processors()
    if vllm_config.speculative_config is not None:
        take_every_parameter()


def check_setup(setup: Any) -> list[str]:
    """Check that no process of the engine would stumble; returns the lines that describe ``setup``.

    Raises ResourceError: too little shared memory; ConfigError: traces cannot be written, the main
    host's ports not listened on, or a directory of compiled code not be taken.
    """
    from sipipe.engine.setup.compiled_models import check_compiled_models
    from sipipe.engine.setup.describe import describe_setup
    from sipipe.engine.setup.host_agreement import check_main_host
    from sipipe.observe.recorder import check_directory
    from sipipe.private import check_named_directory

    check_named_directory()
    check_compiled_models(setup.vllm_config)
    if setup.config.trace is not None:
        check_directory(setup.config.trace)
    if not setup.node:
        check_main_host(setup.config.hosts, setup.config.start_timeout)
    return describe_setup(setup)


def take_first_processors() -> None:
    """Have vLLM's front end look at custom logits processors as those of its PyTorch sampler
    (:mod:`sipipe.worker.hooks.torch_rows`), though the runner is the second one."""
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
