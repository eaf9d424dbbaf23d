"""Arguments of vLLM with SiPipe's executor in them, checked before anything starts.

vLLM's parser is called directly, because the ``vllm`` command of the CPU wheel fails at once (it
asks for a distribution named ``vllm``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sipipe.config import SiPipeConfig
from sipipe.engine.compatibility import check_version
from sipipe.engine.plugin import EXECUTOR_NAMES, register
from sipipe.errors import ConfigError

EXECUTOR = "sipipe.Executor"


def parse_engine_args(
    argv: Sequence[str], settings: dict[str, Any] | None, *, eager_on_cpu: bool = True
) -> argparse.Namespace:
    """Arguments of an engine from ``MODEL`` with words and engine options of vLLM in any order.

    ``words`` of the result are the positional arguments after the model. ``settings`` None: the
    stock executor. ``eager_on_cpu``: run eagerly on the CPU engine unless ``argv`` says
    otherwise, because compiling the model costs more than a short command gains.
    """
    check_version()
    cli_env_setup()  # processes are spawned: a fork of a process with threads may hang
    parser = _WordsParser(prog="sipipe")
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("model_tag", metavar="MODEL")
    parser.set_defaults(enforce_eager=None)
    args: argparse.Namespace = parser.parse_args(list(argv))
    args.model = args.model_tag
    if args.enforce_eager is None:
        args.enforce_eager = eager_on_cpu and current_platform.is_cpu()
    if settings is not None:
        use_sipipe(args, settings)
    return args


class _WordsParser(FlexibleArgumentParser):
    """Takes words from anywhere between the options, and all that stands behind ``--``.

    A positional argument of any number would be empty where an option follows the model.
    """

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        found, extra = super().parse_known_args(given[:end], namespace)
        found.words = [word for word in extra if not word.startswith("-")] + given[end + 1 :]
        return found, [option for option in extra if option.startswith("-")]


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
