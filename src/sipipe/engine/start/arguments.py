"""Arguments of vLLM with SiPipe's executor in them, checked before anything starts.

vLLM's parser is called directly, so that what is wrong is one line and nothing else.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from vllm import AsyncEngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

from sipipe.config import OPTIONS, SiPipeConfig
from sipipe.engine.setup.checkpoint import check_model
from sipipe.engine.start.plugin import EXECUTOR_NAMES, register
from sipipe.engine.start.refusals import before_end, check_given_once, checked
from sipipe.errors import ConfigError
from sipipe.versions import require_vllm

EXECUTOR = "sipipe.Executor"


def begin() -> None:
    """Prepare the process, before a command looks at its arguments. UnsupportedError: another vLLM."""
    require_vllm()
    cli_env_setup()  # processes are spawned: a fork of a process with threads may hang


def parse_engine_args(argv: Sequence[str], settings: dict[str, Any]) -> argparse.Namespace:
    """Arguments of an engine from ``MODEL`` with words and engine options of vLLM in any order.

    ``words`` of the result are the positional arguments after the model. The CPU engine runs eagerly
    unless ``argv`` says otherwise: compiling the model costs more than a short command gains.

    Args:
        settings: SiPipe's settings that the command line has.
    """
    begin()
    parser = _WordsParser(prog="sipipe")
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("model_tag", metavar="MODEL")
    parser.set_defaults(enforce_eager=None)
    args: argparse.Namespace = checked(partial(parser.parse_args, list(argv)))
    args.model = args.model_tag
    if args.enforce_eager is None:
        args.enforce_eager = current_platform.is_cpu()
    use_sipipe(args, settings)
    return args


def engine_args(args: argparse.Namespace) -> AsyncEngineArgs:
    """vLLM's engine arguments, which look for the model where the hub must not be asked."""
    check_model(args.model)
    return checked(lambda: AsyncEngineArgs.from_cli_args(args), args.model)


class OneLineParser(FlexibleArgumentParser):
    """vLLM's parser; a mistake is one line that says which option was perhaps meant."""

    taken: tuple[str, ...] = ("pp", "tp", *OPTIONS)
    """Options that SiPipe has taken from the command line before."""
    not_in_files: tuple[str, ...] = ("--pp", "--tp", "--restart")
    """Those that come here from a file of ``--config``, which is read later, and has vLLM's alone."""

    def parse_args(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line, as vLLM does. Raises ConfigError: an option is given as JSON and key by
        key, of which vLLM would leave the JSON out."""
        self._words = list(sys.argv[1:] if args is None else args)
        parsed: argparse.Namespace = super().parse_args(args, namespace)
        check_given_once(self._words)
        return parsed

    def load_config_file(self, file_path: str) -> list[str]:
        """Read the file of ``--config``, as vLLM does, into words of a command line."""
        try:
            words: list[str] = super().load_config_file(file_path)
        except Exception as error:  # whatever YAML and vLLM's reading of it raise
            raise ConfigError(f"--config {file_path}: {' '.join(str(error).split())}") from None
        self._words[:0] = words  # before a ``--`` of the command line
        return words

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError of one line."""
        wrong = next((word for word in message.split() if word.startswith("--")), "")
        option = wrong.split("=")[0].rstrip(":")
        unknown = message.startswith("unrecognized arguments")
        setting = option.removeprefix("--").replace("-", "_")
        if unknown and setting in SiPipeConfig.__struct_fields__:
            raise ConfigError(
                f"{option} is no option but a setting: "
                f'--additional-config \'{{"sipipe": {{"{setting}": ...}}}}\''
            )
        if unknown and option in self.not_in_files:
            raise ConfigError(
                f"{option} is read on the command line alone: a file of --config has vLLM's options, "
                "such as pipeline-parallel-size"
            )
        taken = (f"--{name.replace('_', '-')}" for name in self.taken)
        options = {*_options(self), *taken, *self.not_in_files}
        long = {name for name in options if name.startswith("--") and name != option}
        near = difflib.get_close_matches(option, long, n=1)
        lines = [line.strip() for line in message.splitlines() if "errors.pydantic.dev" not in line]
        message = " ".join(lines)
        raise ConfigError(message + (f"; did you mean {near[0]}?" if unknown and near else ""))


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Options of ``parser`` and of its subcommands."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                options += _options(command)
    return options


class _WordsParser(OneLineParser):
    """Parser that takes words from anywhere between the options, and all that stand behind ``--``.

    Rejected: a positional argument of any number (``nargs="*"``), which would be empty where an option
    follows the model.
    """

    taken = (*OneLineParser.taken, *SamplingParams.__struct_fields__)
    not_in_files = ("--pp", "--tp")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        line = list(args or ())
        end = len(before_end(line))
        parsed, extra = super().parse_known_args(line[:end], namespace)
        parsed.words = [word for word in extra if not word.startswith("-")] + line[end + 1 :]
        return parsed, [option for option in extra if option.startswith("-")]


def use_sipipe(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Put SiPipe's executor and ``settings`` into parsed arguments of vLLM. Raises ConfigError:
    ``args`` name another executor, or set a setting to another value."""
    backend = args.distributed_executor_backend
    if backend is not None and backend not in EXECUTOR_NAMES:
        raise ConfigError(
            f"--distributed-executor-backend is {backend}, but sipipe runs {EXECUTOR}: leave the "
            "option out (sipipe serve takes ray; stock vLLM is started by its own command)"
        )
    args.distributed_executor_backend = EXECUTOR
    SiPipeConfig.from_additional_config(args.additional_config)
    additional = dict(args.additional_config or {})
    ours = additional.get("sipipe") or {}
    additional["sipipe"] = _merged(ours, settings) if isinstance(ours, dict) else ours
    SiPipeConfig.from_additional_config(additional)
    args.additional_config = additional
    # Entry points are missing where SiPipe is on the path, but not installed.
    load_general_plugins()
    register()


def _merged(ours: dict[str, Any], settings: dict[str, Any], within: str = "") -> dict[str, Any]:
    """The settings ``ours`` of ``--additional-config`` with the command line's ``settings``, both
    ``within`` an object of that name. Raises ConfigError: both have one, with different values."""
    merged = dict(ours)
    for key, value in settings.items():
        if key == "hosts" and isinstance(ours.get(key), dict):  # flags, and stages of each host
            merged[key] = _merged(ours[key], value, f"{key}.")
            continue
        if key in ours and ours[key] != value:
            raise ConfigError(
                f'"{within}{key}" is {value!r} on the command line and {ours[key]!r} in '
                "--additional-config: give it once"
            )
        merged[key] = value
    return merged
