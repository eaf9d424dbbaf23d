"""Starts vLLM's own front ends with SiPipe's executor: the server, and an engine in this process.

vLLM's parser and its modules behind ``vllm serve`` are called directly, because the ``vllm``
command of the CPU wheel fails at once (it asks for a distribution named ``vllm``). All checks
happen here, in the foreground, on the very configuration that the engine will get: a refusal is
one line, not a traceback from a child process.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sipipe.config import SiPipeConfig
from sipipe.cores import plan_cores, this_machine
from sipipe.engine.compatibility import check_features, check_version, choose_path
from sipipe.engine.layers.choose import choose_layers
from sipipe.engine.plugin import EXECUTOR_NAMES, register
from sipipe.errors import ConfigError, ResourceError

EXECUTOR = "sipipe.Executor"

KV_CACHE_SHARE = 0.4
"""Part of the free memory that the CPU stages' KV caches get together, unless told otherwise."""


def serve(argv: Sequence[str], settings: dict[str, Any]) -> int:
    """``vllm serve`` with ``argv``, SiPipe's executor and its ``settings``; returns when it ends.

    Raises:
        ConfigError, UnsupportedError, ResourceError: before anything has been started.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand

    check_version()
    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="sipipe")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    if args.model_tag is not None:
        args.model = args.model_tag
    use_sipipe(args, settings)
    configure_logging_from_args(args)
    command.validate(args)
    vllm_config = checked(
        lambda: AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        )
    )
    announce(vllm_config)
    with own_sockets():
        command.cmd(args)
    return 0


@contextmanager
def own_sockets() -> Iterator[None]:
    """A directory for the sockets of vLLM's front end, which does not remove them; gone at the end."""
    if "VLLM_RPC_BASE_PATH" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="sipipe-", ignore_cleanup_errors=True) as directory:
        os.environ["VLLM_RPC_BASE_PATH"] = directory
        try:
            yield
        finally:
            del os.environ["VLLM_RPC_BASE_PATH"]


def parse_engine_args(
    argv: Sequence[str], settings: dict[str, Any] | None, *, eager_on_cpu: bool = True
) -> argparse.Namespace:
    """Arguments of an engine from ``MODEL [WORD...] [any engine option of vLLM]``.

    ``words`` of the result are the positional arguments after the model. ``settings`` None: the
    stock executor. ``eager_on_cpu``: run eagerly on the CPU engine unless ``argv`` says
    otherwise, because compiling the model costs more than a short command gains.
    """
    check_version()
    cli_env_setup()  # processes are spawned: a fork of a process with threads may hang
    parser = FlexibleArgumentParser(prog="sipipe")
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("model_tag", metavar="MODEL")
    parser.add_argument("words", nargs="*")
    parser.set_defaults(enforce_eager=None)
    args = parser.parse_args(list(argv))
    args.model = args.model_tag
    if args.enforce_eager is None:
        args.enforce_eager = eager_on_cpu and current_platform.is_cpu()
    if settings is not None:
        use_sipipe(args, settings)
    return args


def use_sipipe(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Put SiPipe's executor and ``settings`` into parsed arguments of vLLM.

    Raises:
        ConfigError: ``args`` name another executor, or set a setting to another value.
    """
    backend = args.distributed_executor_backend
    if backend is not None and backend not in EXECUTOR_NAMES:
        raise ConfigError(
            f"--distributed-executor-backend is {backend}, but sipipe runs {EXECUTOR}: leave the "
            "option out (stock vLLM is started by its own command)"
        )
    args.distributed_executor_backend = EXECUTOR
    additional = dict(args.additional_config or {})
    given = additional.get("sipipe") or {}
    if isinstance(given, dict):
        for key, value in settings.items():
            if key in given and given[key] != value:
                raise ConfigError(
                    f'"{key}" is {value!r} on the command line and {given[key]!r} in '
                    "--additional-config: give it once"
                )
        given = given | settings
    additional["sipipe"] = given
    SiPipeConfig.from_additional_config(additional)
    args.additional_config = additional
    _share_memory(args)
    # Entry points are missing where SiPipe is on the path, but not installed.
    load_general_plugins()
    register()


def checked(create: Callable[[], VllmConfig]) -> VllmConfig:
    """The configuration that ``create`` makes, with vLLM's own refusals as one line."""
    from pydantic import ValidationError

    try:
        return create()
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(str(first["msg"]).removeprefix("Value error, ").split("\n")[0]) from error


def announce(vllm_config: VllmConfig) -> None:
    """Check the configuration and print what SiPipe will do with it, the core plan first.

    Raises:
        UnsupportedError: an option that SiPipe does not serve.
        ConfigError: a setting that does not fit the model or the machine.
        ResourceError: too little shared memory.
    """
    config = SiPipeConfig.from_additional_config(vllm_config.additional_config)
    check_features(vllm_config)
    choice = choose_path(vllm_config, config)
    choose_layers(vllm_config, config, choice)
    parallel = vllm_config.parallel_config
    plan = plan_cores(
        this_machine(),
        stages=parallel.pipeline_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        samplers=config.samplers if choice.path == "sipipe" else 0,
        placement=config.cores,
        device="cpu" if current_platform.is_cpu() else "cuda",
    )
    print("\n".join(plan.describe()), file=sys.stderr, flush=True)
    if choice.reason:
        print(f"vLLM's own runner and sampler are used: {choice.reason}", file=sys.stderr)
    check_shared_memory(vllm_config, config)


def check_shared_memory(vllm_config: VllmConfig, config: SiPipeConfig) -> None:
    """Refuse to start where the channels' slots would not fit.

    Raises:
        ResourceError: with the size needed, the size there is, and what to do.
    """
    directory = config.shm_dir or "/dev/shm"
    needed = shared_memory_needed(vllm_config, config)
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ResourceError(
            f"{directory} cannot be used for shared memory ({error.strerror}): name another "
            'directory with "shm_dir"'
        ) from None
    if free < needed:
        raise ResourceError(
            f"{directory} has {free / 2**20:,.0f} MiB free, and this configuration needs up to "
            f"{needed / 2**20:,.0f} MiB: enlarge it (docker run --shm-size), lower --max-num-seqs, "
            'or name another memory directory with "shm_dir"'
        )


def shared_memory_needed(vllm_config: VllmConfig, config: SiPipeConfig) -> int:
    """Upper bound of the bytes that logits slots and transfer buffers take."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    stages, size = parallel.pipeline_parallel_size, model.dtype.itemsize
    slots = config.resolved_inflight(stages)
    vocabulary = math.ceil(model.get_vocab_size() / 64) * 64
    logits = slots * scheduler.max_num_seqs * vocabulary * size
    # Hidden states and residual, two buffers ahead of every later stage.
    hidden = 2 * scheduler.max_num_batched_tokens * model.get_hidden_size() * size
    return logits + (stages - 1) * 3 * hidden + (64 << 20)


def _share_memory(args: argparse.Namespace) -> None:
    """Give the KV caches of several CPU stages a size that fits them all.

    Stock vLLM lets each worker claim nearly all memory of its NUMA node; the second worker on a
    node then finds too little and stops.
    """
    chosen = (
        args.kv_cache_memory_bytes is not None
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        or args.gpu_memory_utilization != AsyncEngineArgs.gpu_memory_utilization
    )
    if not current_platform.is_cpu() or chosen:
        return
    workers = (args.pipeline_parallel_size or 1) * (args.tensor_parallel_size or 1)
    available = psutil.virtual_memory().available
    args.kv_cache_memory_bytes = int(available * KV_CACHE_SHARE / workers) >> 20 << 20
