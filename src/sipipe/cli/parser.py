"""Argument parsing that all subcommands share."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sipipe.config import SiPipeConfig
from sipipe.errors import ConfigError

__all__ = ["Parser", "at_least", "make_parser", "parse_engine_command"]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, raised as :class:`ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('sipipe ')}: {message} (see {self.prog} -h)")


def make_parser(command: str, description: str, **more: Any) -> Parser:
    """The parser of ``sipipe COMMAND``; abbreviated options are not taken."""

    def formatter(prog: str) -> argparse.HelpFormatter:
        width = min(100, shutil.get_terminal_size().columns)
        return argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=30)

    return Parser(
        prog=f"sipipe {command}",
        description=description,
        formatter_class=formatter,
        allow_abbrev=False,
        **more,
    )


def at_least(least: float, kind: Callable[[str], float] = float) -> Callable[[str], Any]:
    """The ``type`` of an option that takes a number from ``least`` on."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < 1e9:
            raise argparse.ArgumentTypeError(f'must be a number of {least} or more, not "{text}"')
        return number

    return parse


def parse_engine_command(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any], list[str]]:
    """The command line of a command that starts an engine.

    Returns the options of ``parser`` and SiPipe's own; the checked entries that these give
    ``additional_config["sipipe"]``; and all other arguments in their order, for vLLM's parser.
    ``--help=GROUP`` is left to vLLM, whose options it shows: ``parser`` has no help of its own.

    Raises:
        ConfigError: a value that :class:`~sipipe.config.SiPipeConfig` refuses.
    """
    _add_engine_options(parser)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        sys.exit(0)
    own, rest = parser.parse_known_args(argv)
    end = rest.index("--") if "--" in rest else len(rest)  # words stand behind it
    for name in ("pp", "tp"):
        value = getattr(own, name)
        if value is not None:
            if not (value.isdecimal() and int(value) >= 1):
                raise ConfigError(f'--{name} must be a whole number of 1 or more, not "{value}"')
            rest[end:end] = [f"-{name}", value]
    return own, _settings(own), rest


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """SiPipe's own options of the commands that start an engine. vLLM has none of these names."""
    group = parser.add_argument_group("SiPipe's options")
    group.add_argument(
        "--samplers", metavar="N", help="CPU sampler processes (default: from the free cores)"
    )
    group.add_argument(
        "--inflight", metavar="N", help="microbatches in flight (default: stages + 1)"
    )
    group.add_argument(
        "--layers",
        metavar="auto|even|N,N",
        help="decoder layers of each stage, such as 7,1 (default: auto)",
    )
    group.add_argument("--trace", metavar="DIR", help="record a trace of the pipeline into DIR")
    group.add_argument(
        "--cores",
        metavar="auto|off|JSON",
        help='core placement: \'{"stages": [[0], [1]], "samplers": [[2]]}\' (default: auto)',
    )
    group.add_argument("--pp", metavar="N", help="pipeline stages: vLLM's -pp")
    group.add_argument("--tp", metavar="N", help="tensor-parallel ranks of a stage: vLLM's -tp")


def _settings(own: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("samplers", "inflight"):
        value = getattr(own, name)
        if value is not None:
            settings[name] = int(value) if value.lstrip("-").isdecimal() else value
    if own.layers is not None:
        counts = own.layers.split(",")
        named = not all(count.strip().isdecimal() for count in counts)
        settings["layers"] = own.layers if named else [int(count) for count in counts]
    if own.trace is not None:
        settings["trace"] = own.trace
    if own.cores is not None:
        settings["cores"] = own.cores if own.cores in ("auto", "off") else _json(own.cores)
    SiPipeConfig.from_dict(settings)
    return settings


def _json(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'--cores must be auto, off, or JSON such as {{"stages": [[0], [1]]}}: {error}'
        ) from None
