"""Starts vLLM's own front ends with SiPipe's executor: the server, and an engine in this process.

All checks happen in the foreground, on the configuration that the engine will get, in one line.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from vllm import envs
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext

from sipipe.config import STEPS_ASIDE
from sipipe.engine.hosts.agent import run_agent
from sipipe.engine.hosts.ray_placement import place
from sipipe.engine.setup.decide import decide
from sipipe.engine.setup.record import Setup
from sipipe.engine.start import plugin
from sipipe.engine.start.arguments import OneLineParser, begin, engine_args, use_sipipe
from sipipe.engine.start.aside import leave_sipipe_out, steps_aside
from sipipe.engine.start.late_values import load_parsers
from sipipe.engine.start.plugin import engine_config
from sipipe.engine.start.refusals import checked
from sipipe.errors import ConfigError, say, tell
from sipipe.ipc.sockets import free_path
from sipipe.ipc.tcp import check_port

MIDDLEWARE = "sipipe.engine.start.health.Health"
"""ASGI middleware that vLLM's API servers get."""


def serve(
    argv: Sequence[str],
    settings: dict[str, Any],
    node: int = 0,
    *,
    started: Callable[[argparse.Namespace], object],
) -> int:
    """Run ``vllm serve`` with ``argv``, SiPipe's executor and its ``settings``; returns when it ends.

    Raises ConfigError, UnsupportedError, ResourceError before any start.

    Args:
        node: The number of this host. From 1 on it runs the host agent, and no server.
        started: Called with vLLM's arguments once they pass all checks.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand

    begin()
    command = ServeSubcommand()
    args = _parsed(command, argv)
    by_ray = args.distributed_executor_backend == "ray"
    if by_ray:
        args.distributed_executor_backend = None
    use_sipipe(args, settings)
    _check_arguments(args, command)
    arguments = engine_args(args)
    if not by_ray and steps_aside(arguments):
        return _serve_by_vllm(args, command, arguments.model, started)
    vllm_config = engine_config(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    if by_ray:
        placement = place(vllm_config)
        args.additional_config = vllm_config.additional_config
    setup = decide(vllm_config, node)
    if not node:
        _check_address(args)
    announce(setup)
    if node:
        return run_agent(setup, met=partial(started, args))
    if by_ray:
        placement.start(vllm_config)
    if not envs.VLLM_USE_RUST_FRONTEND:
        args.middleware = [*args.middleware, MIDDLEWARE]
    started(args)
    command.cmd(args)
    return 0


def _parsed(command: Any, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of vLLM's ``serve`` command in ``argv``. Raises ConfigError: they have no model."""
    parser = OneLineParser(prog="sipipe")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args: argparse.Namespace = checked(partial(parser.parse_args, ["serve", *argv]))
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word.split("=")[0] in ("--model", "--config") for word in argv):
        raise ConfigError("serve: name the MODEL, a directory or a name on the Hugging Face hub")
    # Those of the command line have been taken from it (:mod:`sipipe.cli.serve`).
    for field, absent in {"nnodes": 1, "node_rank": 0, "headless": False}.items():
        if getattr(args, field, absent) != absent:
            option = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{option} is read on the command line alone, not in --config's file")
    return args


def _check_arguments(args: argparse.Namespace, command: Any) -> None:
    """Let vLLM check its own arguments, and set its logging up by them."""
    from vllm.entrypoints.launchers.launcher import validate_api_server_args

    checked(partial(configure_logging_from_args, args))
    checked(partial(command.validate, args))
    load_parsers(args)  # a plugin adds parsers to those that are known
    checked(partial(validate_api_server_args, args))


def _serve_by_vllm(
    args: Any, command: Any, model: str, started: Callable[[argparse.Namespace], object]
) -> int:
    """Run vLLM's server with its own executor, and with the arguments that stock vLLM has."""
    leave_sipipe_out(args)
    # A refusal is one line here. vLLM writes into what its arguments hold, so a copy is checked.
    checked(engine_args(deepcopy(args)).create_engine_config, model)
    _check_address(args)
    tell(STEPS_ASIDE)
    started(args)
    command.cmd(args)
    return 0


def _check_address(args: Any) -> None:
    """Refuse a port that is taken, and take away a socket's file that nobody listens on."""
    if not (args.uds or args.headless):  # vLLM looks too, but shares a port that allows it
        check_port(args.host or "", args.port, "choose another --port")
    if args.uds:
        free_path(args.uds)


def announce(setup: Setup) -> None:
    """Print what SiPipe will do, which its engine does not say again. Raises as ``check_setup``."""
    lines = plugin.check_setup(setup)
    plugin.announced = True
    say("\n".join(lines))
