"""The ``sipipe`` command. A subcommand's module is imported when it runs, and not before.

A subcommand is a module of this package with ``main(argv) -> int``: it parses its arguments with
:func:`sipipe.cli.parser.make_parser`, returns the exit status, and lets a
:class:`~sipipe.errors.SiPipeError` rise: it is shown as one line.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sipipe._version import __version__
from sipipe.errors import ConfigError, SiPipeError

__all__ = ["main"]

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("serve", "serve a model through vLLM's OpenAI server, with SiPipe"),
        "generate": ("generate", "complete prompts from arguments, a file or stdin"),
        "bench": ("bench", "measure SiPipe against stock vLLM on a model, in one run"),
        "plan": ("plan", "choose pipeline and tensor degrees for a model and a cluster"),
        "trace": ("trace", "report on and export recorded traces"),
        "top": ("top", "live view of a running server"),
        "make-model": ("make_model", "write a random checkpoint to test and measure on"),
        "doctor": ("doctor", "what this machine has, and what SiPipe would do on it"),
    }
)
"""Command: module of this package, and what it does in a line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``sipipe`` command; returns the exit status.

    0: done. 1: something failed. 2: a mistake in the command line. 130: interrupted.
    143: ended by SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # A command that is ended cleans up as one that is interrupted does. (vLLM's server
        # installs handlers of its own.)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _dispatch(arguments)
    except SiPipeError as error:
        print(f"sipipe: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`sipipe doctor | head -1`): not an error. Python would
        # still complain when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        print(f"sipipe {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else "; see sipipe --help"
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(f'unknown {kind} "{name}"{hint}')
    module = importlib.import_module(f"sipipe.cli.{COMMANDS[name][0]}")
    status: int = module.main(rest)
    return status


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            f"sipipe {__version__}: pipeline-parallel vLLM without bubbles",
            "",
            "usage: sipipe COMMAND [options]",
            "",
            *lines,
            "",
            "sipipe COMMAND --help shows a command's options; sipipe --version the version.",
        ]
    )
