"""Starts vLLM's own front ends with SiPipe's executor: the server, and an engine in this process.

All checks happen here, in the foreground, on the very configuration that the engine will get: a
refusal is one line, not a traceback from a child process.
"""

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext

from sipipe.cores import CorePlan
from sipipe.engine.arguments import OneLineParser, checked, use_sipipe
from sipipe.engine.compatibility import check_version
from sipipe.engine.kv_share import share_kv_memory
from sipipe.engine.setup import Setup
from sipipe.errors import ConfigError
from sipipe.observe.recorder import check_directory


def serve(argv: Sequence[str], settings: dict[str, Any]) -> int:
    """``vllm serve`` with ``argv``, SiPipe's executor and its ``settings``; returns when it ends.

    Raises:
        ConfigError, UnsupportedError, ResourceError: before anything has been started.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand

    check_version()
    cli_env_setup()
    command = ServeSubcommand()
    parser = OneLineParser(prog="sipipe")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word.split("=")[0] in ("--model", "--config") for word in argv):
        raise ConfigError("serve: name the MODEL, a directory or a name on the Hugging Face hub")
    use_sipipe(args, settings)
    configure_logging_from_args(args)
    command.validate(args)
    vllm_config = checked(
        lambda: AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        ),
        args.model,
    )
    _check_port(args)
    share_kv_memory(args, vllm_config, announce(vllm_config))
    with own_sockets():
        command.cmd(args)
    return 0


def _check_port(args: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` where another server has the port.

    vLLM looks after it has read the model's configuration and before it starts the engine, but
    shares the port with a server that allows it.
    """
    if args.uds or args.headless:
        return
    family = socket.AF_INET6 if ":" in (args.host or "") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host or "", args.port))
        except OSError as error:
            where = f"--host {args.host} --port" if args.host else "--port"
            raise ConfigError(f"{where} {args.port}: {error.strerror}") from None


@contextmanager
def own_sockets() -> Iterator[None]:
    """A directory for the sockets of vLLM's front end, which leaves them; removed at the end."""
    if "VLLM_RPC_BASE_PATH" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="sipipe-", ignore_cleanup_errors=True) as directory:
        os.environ["VLLM_RPC_BASE_PATH"] = directory
        try:
            yield
        finally:
            del os.environ["VLLM_RPC_BASE_PATH"]


def announce(vllm_config: VllmConfig) -> CorePlan:
    """Check the configuration and print what SiPipe will do with it; returns the core plan.

    Raises:
        UnsupportedError: an option that SiPipe does not serve.
        ConfigError: a setting that does not fit the model or the machine.
        ResourceError: too little shared memory.
    """
    setup = Setup.of(vllm_config)
    print("\n".join(setup.describe()), file=sys.stderr, flush=True)
    if setup.reason:
        print(f"vLLM's own runner and sampler are used: {setup.reason}", file=sys.stderr)
    if setup.config.trace is not None:
        check_directory(setup.config.trace)
    return setup.cores
