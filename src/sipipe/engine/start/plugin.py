"""The ``vllm.general_plugins`` entry point: what vLLM runs in each of its processes.

It adds SiPipe's figures to ``/metrics`` and what docs/upstream.md lists, for SiPipe's engines.
"""

import difflib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from logging import getLogger
from multiprocessing import current_process, parent_process
from pathlib import Path
from socket import gaierror
from typing import Any, TypeVar
from unittest.mock import patch

from sipipe.environment import check_environment
from sipipe.errors import ConfigError, ResourceError, SiPipeError, tell
from sipipe.ipc.last_word import leave_last_word
from sipipe.start_log import leave_out_what_is_wrong
from sipipe.versions import require_vllm

T = TypeVar("T")
REFUSALS = OSError, ValueError, TypeError, RuntimeError, ImportError, LookupError

EXECUTOR_NAMES = frozenset({"sipipe", "sipipe.Executor", "sipipe.engine.executor.Executor"})

announced = False
"""Whether a command of ours has checked and said how the engine of this process is set up."""


def register() -> None:
    """Called by vLLM, possibly several times in a process."""
    from huggingface_hub import constants
    from vllm.engine import arg_utils

    from sipipe.config import STEPS_ASIDE
    from sipipe.engine.children.forking import fork_of_vllms
    from sipipe.engine.setup.checkpoint import check_model, check_path
    from sipipe.engine.start.aside import leave_sipipe_out, steps_aside
    from sipipe.engine.start.late_values import check_server

    create = arg_utils.EngineArgs.create_engine_config
    if getattr(create, "__sipipe__", False):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _one_line():
            if not _asks_for_us(self.distributed_executor_backend):
                return create(self, *args, **kwargs)
            if steps_aside(self):
                if current_process().name == "MainProcess":  # API servers make it again
                    getLogger("vllm.sipipe").info("SiPipe: %s", STEPS_ASIDE)
                leave_sipipe_out(self)
                return create(self, *args, **kwargs)
            if _is_vllms_command() and sys.argv[1:2] == ["serve"]:
                fork_of_vllms()
            named = "-pp" if _is_vllms_command() else "pipeline_parallel_size"
            made = engine_config(self, *args, stages=named, **kwargs)
            from sipipe.engine.setup.decide import decide

            # Else Ray has the hosts, or the engines have been decided on, and have taken memory.
            serves = current_process().name.startswith("ApiServer")
            decided = announced and made.replicas == 1  # by a command of ours
            if made.parallel_config.placement_group is None and not (serves or decided):
                setup = decide(made)
                if not announced:
                    check_setup(setup)
                if made.replicas > 1 and setup.kv_bytes is not None:
                    # What each one gets, while none of them has taken any memory.
                    made.cache_config.kv_cache_memory_bytes = setup.kv_bytes
            made.announced = announced
            return made

    begin = arg_utils.EngineArgs.__post_init__

    @wraps(begin)
    def post_init(self: Any) -> None:
        with _one_line():
            asked = _asks_for_us(self.distributed_executor_backend)
            if asked:
                check_environment()  # every door makes these arguments first
            if not (constants.HF_HUB_OFFLINE and asked):
                begin(self)
                return
            check_model(self.model)
            checked(partial(begin, self), self.model)  # vLLM looks for it here then

    convert = arg_utils.EngineArgs.from_cli_args.__func__

    @wraps(convert)
    def from_cli_args(cls: type, args: Any) -> Any:
        with _one_line():
            asked = _asks_for_us(getattr(args, "distributed_executor_backend", None))
            for adapter in (asked and getattr(args, "lora_modules", None)) or ():
                # vLLM looks when the engine has started.
                check_path(os.path.expanduser(adapter.path), f"--lora-modules {adapter.name}")
            if asked:
                check_server(args)
        return convert(cls, args)

    create_engine_config.__sipipe__ = True  # type: ignore[attr-defined]
    arg_utils.EngineArgs.create_engine_config = create_engine_config
    arg_utils.EngineArgs.__post_init__ = post_init
    arg_utils.EngineArgs.from_cli_args = classmethod(from_cli_args)


def _asks_for_us(backend: Any) -> bool:
    """Whether an engine is to have our executor; a name that is nearly ours is a ConfigError."""
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
    it themselves. ``stages``: the option that the user has for them. Raises ConfigError or
    UnsupportedError for what SiPipe or vLLM refuse."""
    require_vllm()  # where this is another vLLM
    leave_out_what_is_wrong()
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml
    from vllm.v1.engine import utils
    from vllm.v1.utils import shutdown

    from sipipe.config import SiPipeConfig
    from sipipe.engine.executor import Executor
    from sipipe.engine.scheduling.speculation import fill_in
    from sipipe.engine.setup.checkpoint import check_files, check_model, check_path
    from sipipe.engine.setup.compatibility import (
        check_features,
        check_stages,
        device_may_draw,
        installed_processors,
        schedules_ahead,
    )
    from sipipe.engine.setup.vllm_config import PipelineVllmConfig
    from sipipe.engine.start.drain import tell_left_over
    from sipipe.engine.start.ends import say_cause_last, watch_ends
    from sipipe.engine.start.new_requests import check_new_requests
    from sipipe.engine.start.prompt_text import keep_prompts_text_out
    from sipipe.engine.start.sessions import end_turns_with_their_session
    from sipipe.gpu_slices import find_gpus_of_slices
    from sipipe.observe import metrics

    SiPipeConfig.from_additional_config(engine_args.additional_config)
    find_gpus_of_slices(current_platform, import_pynvml)
    metrics.register()
    tell_clients_why()
    check_new_requests()
    end_turns_with_their_session()
    keep_prompts_text_out()
    tell_left_over()
    watch_ends()
    if _is_vllms_command() and parent_process() is None:
        say_cause_last()
    # For no seconds vLLM's server kills all, with a warning for each: one less than the supervisor.
    utils.shutdown = lambda processes, timeout=None: shutdown(processes, timeout or 7)
    engine_args.distributed_executor_backend = Executor
    seqs = engine_args.max_num_seqs  # vLLM would name another option, that follows from it
    if seqs is not None and not (isinstance(seqs, int) and seqs > 0):
        raise ConfigError(f"--max-num-seqs must be a whole number of 1 or more, not {seqs!r}")
    if not isinstance(pp := engine_args.pipeline_parallel_size, int):
        raise ConfigError(f"{stages} must be a whole number of 1 or more, not {pp!r}")
    if head := fill_in(engine_args):
        check_path(head, '--speculative-config "model"')
    check_model(engine_args.model)
    create = arg_utils.EngineArgs.create_engine_config.__wrapped__
    ahead = engine_args.async_scheduling
    with (
        patch.object(arg_utils, "VllmConfig", PipelineVllmConfig),
        patch.object(engine_args, "async_scheduling", False),  # vLLM's is for its own executors
    ):
        made = checked(partial(create, engine_args, *args, **kwargs), engine_args.model)
    made.replicas = made.parallel_config.data_parallel_size
    check_features(made)
    check_stages(made, stages)
    check_files(made)
    made.ahead = schedules_ahead(made, ahead)
    processors = made.model_config.logits_processors or installed_processors()
    if processors and made.model_config.runner_type != "pooling" and not device_may_draw():
        take_first_processors()
    if made.speculative_config is not None:
        take_every_parameter()
    return made


def check_setup(setup: Any) -> list[str]:
    """What ``setup`` says, if no process of the engine would stumble. Raises ResourceError: too little
    shared memory; ConfigError: traces cannot be written, the main host's ports not listened on, or a
    directory of compiled code not be taken."""
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


def checked(call: Callable[[], T], model: str = "") -> T:
    """What vLLM's ``call`` gives. Raises ConfigError: it refuses; ResourceError: no hub answers."""
    from pydantic import ValidationError
    from vllm.exceptions import VLLMError

    from sipipe.engine.setup.checkpoint import ask_hub

    try:
        ask_hub(model)
        return call()
    except SiPipeError:
        raise
    except ValidationError as error:
        raise ConfigError(_named(error.title, error.errors()[0])) from error
    except (*REFUSALS, VLLMError) as error:
        what = f'MODEL "{model}" cannot be read: ' if model and isinstance(error, OSError) else ""
        what = f"{type(error).__name__}: " if isinstance(error, LookupError | TypeError) else what
        refusal = ResourceError if _unreached(error) else ConfigError
        raise refusal(f"{what}{_first_line(error)}") from error


def _unreached(error: BaseException | None) -> bool:
    """Whether a hub was not reached, though it was allowed: the next try may."""
    while error is not None and not isinstance(error, gaierror | ConnectionError | TimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None and not type(error).__module__.startswith("huggingface_hub")


def _named(config: str, found: Any) -> str:
    """What pydantic found, with the option's name."""
    from vllm import EngineArgs

    line, name = _first_line(found["msg"]), ".".join(map(str, found["loc"][:1]))
    if not name:
        return line
    known = name in EngineArgs.__dataclass_fields__
    option = f"--{name.replace('_', '-')}" if known else f"{config}.{name}"
    return f"{option}: {line}, not {str(found['input'])[:60]!r}"


def _first_line(message: object) -> str:
    first, *rest = str(message).removeprefix("Value error, ").strip().split("\n")
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


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


def tell_clients_why() -> None:
    """Have ``AsyncLLM.generate`` raise why a request failed, as it raises what is wrong with one.
    The scheduler puts the reason where vLLM has that of a stop (``ObservedScheduler``); the server
    looks at the finish reason only, unless it is raised. A grammar that does not compile is the
    client's error (status 400), as vLLM 0.33 has it, and so is what the engine refuses."""
    from vllm.exceptions import GenerationError, VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineGenerateError

    from sipipe.engine.iteration.admission import REFUSED
    from sipipe.engine.scheduling.compilations import INVALID
    from sipipe.engine.start.drain import EndedFirstError, is_ending
    from sipipe.engine.start.sessions import checked_turns, ends_session, is_session

    generate = AsyncLLM.generate
    if getattr(generate, "__sipipe__", False):
        return

    @wraps(generate)
    async def generate_or_raise(
        self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        session = is_session(prompt)
        if session:
            prompt = checked_turns(prompt, sampling_params)
        try:
            async with aclosing(
                generate(self, prompt, sampling_params, *args, **kwargs)
            ) as outputs:
                begun = False
                async for output in outputs:
                    for sequence in output.outputs:
                        begun = begun or bool(sequence.token_ids)
                        if sequence.finish_reason == "abort" and not begun and is_ending(self):
                            raise EndedFirstError  # it came as the engine was told to end
                        if sequence.finish_reason == "error" and sequence.stop_reason:
                            why = sequence.stop_reason
                            refused = why.startswith((INVALID, REFUSED))
                            raise VLLMValidationError(why) if refused else GenerationError(why)
                    yield output
                    if session and ends_session(output):
                        return
        except EngineGenerateError as error:
            cause = error.__cause__
            if str(error) or cause is None:
                raise
            # vLLM gives its own error no text, and a client would get an empty message.
            reason = f"vLLM's front end failed: {type(cause).__name__}: {cause}"
            if self.errored:  # for everybody: the server ends now
                leave_last_word(reason)
            raise EngineGenerateError(reason) from cause

    # That the engine is gone has been said, or was meant, and the traceback is nobody's fault.
    getLogger(AsyncLLM.__module__).addFilter(lambda it: "EngineDeadError" not in str(it.exc_info))
    generate_or_raise.__sipipe__ = True  # type: ignore[attr-defined]
    AsyncLLM.generate = generate_or_raise
