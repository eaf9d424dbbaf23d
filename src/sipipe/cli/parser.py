"""Argument parsing that all subcommands share."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from sipipe.config import OPTIONS, SiPipeConfig
from sipipe.cores import MOST_PLANNED
from sipipe.errors import ConfigError

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are raised as :class:`ConfigError`, in one line. Like vLLM's, it
    takes underscores in the names of long options; the words that it leaves have dashes there."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse ``args``, which have to be given, as ``argparse`` does."""
        name = re.compile(r"^--\w[\w-]*(?=[=.]|$)")
        words = list(args)
        end = words.index("--") if "--" in words else len(words)  # behind it are no options
        dashed = [name.sub(lambda at: at[0].replace("_", "-"), word) for word in words[:end]]
        return super().parse_known_args(dashed + words[end:], namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('sipipe ')}: {message} (see {self.prog} -h)")


def make_parser(
    command: str,
    description: str,
    *,
    usage: str | None = None,
    epilog: str | None = None,
    add_help: bool = True,
) -> Parser:
    """The parser of ``sipipe COMMAND``. It takes no abbreviated options."""
    width = min(100, shutil.get_terminal_size().columns)
    formatter = partial(argparse.RawDescriptionHelpFormatter, width=width, max_help_position=30)
    return Parser(
        prog=f"sipipe {command}",
        description=description,
        formatter_class=formatter,
        allow_abbrev=False,
        usage=usage,
        epilog=epilog,
        add_help=add_help,
    )


def adder(
    group: argparse._ActionsContainer,
) -> Callable[[str, Callable[[str], Any], Any, str, str], None]:
    """A function that adds options with a value to ``group``: name, type, default, metavar, help."""

    def add(name: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    return add


def checked(
    convert: Callable[[str], Value], allowed: str, valid: Callable[[Value], bool]
) -> Callable[[str], Value]:
    """The ``type`` of an option whose value ``convert`` makes of its text. A value that is not
    ``valid``, and a text for which ``convert`` raises ValueError or KeyError, are refused; ``allowed``
    says what is taken."""

    def parse(text: str) -> Value:
        with suppress(ValueError, KeyError):
            value = convert(text)
            if valid(value):
                return value
        raise argparse.ArgumentTypeError(f'must be {allowed}, not "{text[:60]}"')

    return parse


def at_least(
    least: float, kind: Callable[[str], float] = float, most: float = 1e9
) -> Callable[[str], Any]:
    """The ``type`` of an option that takes a number from ``least`` to ``most``. The default of ``most``
    only keeps sums finite and loops short, so the error does not name it."""
    noun = "whole number" if kind is int else "number"
    allowed = f"a {noun} of {least} or more" if most == 1e9 else f"a {noun} from {least} to {most}"
    return checked(kind, allowed, lambda number: least <= number <= most)


def counts(text: str) -> list[int]:
    """The ``type`` of an option that takes a list of whole numbers of 1 or more."""
    return [at_least(1, int)(part) for part in text.split(",")]


fraction = checked(float, "a share above 0 and up to 1, such as 0.9", lambda x: 0 < x <= 1)


def parse_engine_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    suiting: Callable[[argparse.Namespace, Sequence[str]], tuple[int, int]] | None = None,
) -> tuple[argparse.Namespace, dict[str, Any], list[str]]:
    """Parse the command line of a command that starts an engine.

    Args:
        parser: the command's own options, to which SiPipe's are added.
        argv: the command line behind the command.
        suiting: chooses the degrees for ``--pp auto``; None: the command has no such choice.

    Returns the options of ``parser`` and SiPipe's; the checked entries that these give
    ``additional_config["sipipe"]``; and all other arguments, for vLLM's parser, which also shows
    ``--help=GROUP``. Raises ConfigError: a value that :class:`~sipipe.config.SiPipeConfig` refuses.
    """
    _add_engine_options(parser)
    options = argv[: argv.index("--")] if "--" in argv else argv
    if "-h" in options or "--help" in options:
        parser.print_help()
        sys.exit(0)
    args, words = parser.parse_known_args(argv)
    if args.pp == "auto":
        if suiting is None:
            raise ConfigError("--pp auto is an option of sipipe serve: give a number")
        args.pp, args.tp = suiting(args, words)
    end = words.index("--") if "--" in words else len(words)
    for name, long in (("pp", "--pipeline-parallel-size"), ("tp", "--tensor-parallel-size")):
        value = getattr(args, name)
        if value is not None:
            duplicates = [word for word in words[:end] if word.split("=")[0] in (f"-{name}", long)]
            if duplicates:
                raise ConfigError(f"--{name} and {duplicates[0]} are the same option: give it once")
            words[end:end] = [f"-{name}", str(value)]
    # `in` and not a test for None: null is a value, too.
    settings = {name: vars(args)[name] for name in OPTIONS if name in args}
    SiPipeConfig.from_dict(settings)
    return args, settings, words


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """SiPipe's own options of the commands that start an engine. vLLM has none of these names."""
    group = parser.add_argument_group("SiPipe's options")
    count = at_least(1, int, MOST_PLANNED)
    placed = 'core placement: \'{"stages": [[0], [1]], "samplers": [[2]]}\' (default: auto)'
    for name, kind, metavar, text in (
        ("samplers", _setting, "N", "CPU sampler processes (default: from the free cores)"),
        ("inflight", _setting, "N", "microbatches in flight (default: stages + 1)"),
        ("layers", _layers, "auto|even|N,N", "layers of each stage, such as 7,1 (default: auto)"),
        ("vocabulary", str, "auto|shared|last", "who has the output projection (default: auto)"),
        ("trace", str, "DIR", "record a trace of the pipeline into DIR"),
        ("trace-limit", _setting, "MIB", "of which the newest MIB are kept (default: 1024)"),
        ("cores", _setting, "auto|off|JSON", placed),
        ("pp", _stages, "N", "pipeline stages: vLLM's -pp; of serve also auto"),
        ("tp", count, "N", "tensor-parallel ranks of a stage: vLLM's -tp"),
    ):
        absent = None if name in ("pp", "tp") else argparse.SUPPRESS
        group.add_argument(f"--{name}", type=kind, default=absent, metavar=metavar, help=text)


def _stages(text: str) -> Any:
    """The ``type`` of ``--pp``."""
    return text if text == "auto" else at_least(1, int, MOST_PLANNED)(text)


def _setting(text: str) -> Any:
    """The ``type`` of a setting: JSON, or a word. :class:`~sipipe.config.SiPipeConfig` checks it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _layers(text: str) -> Any:
    """The ``type`` of ``--layers``: a word, or numbers with commas."""
    return text if text.isalpha() else _setting(f"[{text}]")
