"""The ``sipipe`` command. A subcommand's module is imported when it runs, and not before.

A subcommand is a module of this package with ``main(argv) -> int``: it parses its arguments with
:func:`sipipe.cli.parser.make_parser`, returns the exit status, and lets a
:class:`~sipipe.errors.SiPipeError` rise: it is shown as one line.
"""

import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from sipipe._version import __version__
from sipipe.errors import ConfigError, SiPipeError, tell
from sipipe.ipc.lost_exit import ask_again_for_lost_exits
from sipipe.linux import open_standard_streams

COMMANDS = {
    "serve": "serve a model through vLLM's OpenAI server, with SiPipe",
    "generate": "complete prompts from arguments, a file or stdin",
    "bench": "measure SiPipe against stock vLLM on a model, in one run",
    "plan": "choose pipeline and tensor degrees for a model and a cluster",
    "trace": "report on and export recorded traces",
    "top": "live view of a running server",
    "make-model": "unpack a small trained model, to try SiPipe with",
    "warm": "compile all kernels now, so that later starts need not",
    "gpu-check": "whether SiPipe works on this machine's GPUs, as a file to send",
    "doctor": "what this machine has, and what SiPipe would do on it",
}
"""Commands, each with a line on what it does. A command's module has its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``sipipe`` command; returns the exit status.

    0: done. 1: something failed. 2: a mistake in the command line. 130: interrupted.
    143: ended by SIGTERM.
    """
    try:
        return _main(argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                # The reader of the output has gone (`sipipe doctor | head -1`), or its disk is full.
                # Python would fail to flush the rest at its end, and have another status.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        open_standard_streams()
        # A command that gets SIGTERM cleans up as one that gets Ctrl-C. vLLM's server has a handler of
        # its own.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        ask_again_for_lost_exits()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # "…" on a terminal whose encoding is Latin-1
    try:
        try:
            status = _dispatch(arguments)
        except SystemExit as ended:
            if ended.code:
                raise
            status = 0  # the parser exits behind --help
        print(end="", flush=True)  # flushed here, where a reader that has gone is no error
        return status
    except SiPipeError as error:
        tell(error)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has gone
        return 0
    except OSError as error:  # this machine has no place for a file, or for one more process
        tell(error)
        return 1


def _dispatch(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name; returns its exit status."""
    name, *options = arguments or ["help"]
    if name in ("-h", "--help", "help"):
        print(f"sipipe {__version__}: pipeline-parallel vLLM, sampling on idle CPU cores\n")
        print("usage: sipipe COMMAND [options]\n")
        for command, line in COMMANDS.items():
            print(f"  {command:<10}  {line}")
        print("\nsipipe COMMAND --help shows a command's options; sipipe --version the version.")
        return 0 if arguments else 2
    if name in ("-V", "--version", "version"):
        print(f"sipipe {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else "; see sipipe --help"
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(f'unknown {kind} "{name}"{hint}')
    try:
        os.getcwd()  # libraries ask for it as they are imported; one of them ends the process
    except OSError:
        raise ConfigError("the working directory is gone: change into another one") from None
    return int(importlib.import_module(f"sipipe.cli.{name.replace('-', '_')}").main(options))
