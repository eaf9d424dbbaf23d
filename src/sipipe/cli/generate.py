"""``sipipe generate``: completes prompts, streaming, with an engine of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sipipe.cli.parser import Parser, at_least, checked, make_parser, parse_engine_command
from sipipe.errors import ConfigError, tell
from sipipe.versions import explained, require_vllm

if TYPE_CHECKING:
    from sipipe.engine.start.generate import Completion, Event

EPILOG = """\
Every engine option of vLLM is taken as well (--dtype, --max-model-len, …).

  sipipe generate MODEL "Once upon a time" "The capital of France is" --pp 2
  sipipe generate MODEL --file prompts.txt --json --temperature 0.8 > answers.jsonl
"""

NUMBERS = {
    "top_p": checked(float, "a number above 0 and up to 1", lambda p: 0 < p <= 1),
    "min_p": at_least(0, float, 1),
    "repetition_penalty": checked(float, "a number above 0", lambda r: 0 < r < float("inf")),
    "presence_penalty": at_least(-2, float, 2),
    "frequency_penalty": at_least(-2, float, 2),
}
"""Types of options, with vLLM's ranges: its own check would come after seconds of imports."""
NO_PROMPT = "generate: no prompt: give one as an argument, with --file, or on stdin"
SAMPLING = (*NUMBERS, "max_tokens", "temperature", "top_k", "seed", "stop", "ignore_eos")
"""Options that are fields of vLLM's ``SamplingParams``, by their names there."""


def main(argv: Sequence[str]) -> int:
    """Complete the prompts; returns the exit status. 0: all were completed. 1: some failed."""
    parser = _parser()
    args, settings, words = parse_engine_command(parser, argv)
    if not words:
        raise ConfigError("generate: name the MODEL: sipipe generate MODEL [PROMPT ...]")
    # A file is read before vLLM is imported. Only vLLM's parser can say which words are prompts.
    lines = None if args.file is None else read_prompts(args.file)
    if len(words) == 1 and lines is None and _nobody_writes():
        raise ConfigError(NO_PROMPT)

    # The engine's log is for servers; here the text matters. Set before vLLM is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    require_vllm()
    with explained():
        from sipipe.engine.start.generate import generate

    parameters = {name: getattr(args, name) for name in SAMPLING}
    completed = generate(
        words,
        settings,
        {name: value for name, value in parameters.items() if value is not None},
        prompts=lambda words: prompts_of(words, lines),
        chat=args.chat,
        show=_show_json if args.json else _show_text,
    )
    return 0 if completed else 1


def _parser() -> Parser:
    """The options of ``sipipe generate`` itself."""
    parser = make_parser(
        "generate",
        "Complete prompts; the first one's text is shown as it comes.",
        usage="sipipe generate MODEL [PROMPT ...] [options] [any engine option of vLLM]",
        epilog=EPILOG,
        add_help=False,
    )
    source = parser.add_argument_group("prompts: arguments, or else a file, or else stdin")
    source.add_argument("--file", metavar="FILE", help="one prompt per line; - is stdin")
    source.add_argument("--chat", action="store_true", help="wrap prompts in the chat template")
    source.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    sampling = parser.add_argument_group("sampling, as in vLLM's SamplingParams")
    count = at_least(1, int)
    temperature = at_least(0, float, 2)
    top_k = at_least(-1, int)
    seed = checked(int, "a whole number of 64 bits", lambda n: -(2**63) <= n < 2**63)
    sampling.add_argument("--max-tokens", type=count, default=64, metavar="N", help="default: 64")
    sampling.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="default: 0"
    )
    for name, kind in NUMBERS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    sampling.add_argument("--top-k", type=top_k, metavar="K")
    sampling.add_argument("--sampling-seed", dest="seed", type=seed, metavar="S", help="of draws")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    return parser


def prompts_of(words: Sequence[str], lines: list[str] | None) -> list[str]:
    """The prompts: ``words`` of the command line, or ``lines`` of ``--file``, or else lines of stdin.
    Raises ConfigError: there are none, or of two kinds."""
    if words and lines is not None:
        raise ConfigError("generate: prompts come from the arguments or from --file, not from both")
    if words:
        return list(words)
    if lines is not None:
        return lines
    if _nobody_writes():
        raise ConfigError(NO_PROMPT)
    return read_prompts("-")


def _nobody_writes() -> bool:
    """Say if stdin is closed, or a terminal, at which nobody expects to be waited for."""
    return sys.stdin is None or sys.stdin.isatty()


def read_prompts(file: str) -> list[str]:
    """Lines of a file, or of stdin (``-``), that are not empty. Raises ConfigError: there are none."""
    try:
        if file == "-":
            # wait: none; whoever writes the prompts, or Ctrl-C
            text = "" if sys.stdin is None else sys.stdin.read()  # None: it was closed (<&-)
        else:
            text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"generate: cannot read --file {file}: {reason}") from None
    text = text.removeprefix("\ufeff")  # editors of Windows put it in front of UTF-8
    # Not `splitlines`, which also cuts at characters within a line, such as U+2028 and a form feed.
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"generate: {'stdin' if file == '-' else file} holds no prompt")
    return lines


def _show_text(event: Event, completion: Completion, text: str) -> None:
    """Print a prompt, dimmed on a terminal, then its completion as it comes; an empty line between
    prompts."""
    if event == "begin":
        dim, plain = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"{dim}{completion.prompt}{plain}", end="", flush=True)
    elif event == "text":
        print(text, end="", flush=True)
    else:
        print("\n", flush=True)
        if completion.error:
            tell(f"this prompt failed: {completion.error}")


def _show_json(event: Event, completion: Completion, _text: str) -> None:
    """Print a completion as one line of JSON when it is complete."""
    if event == "end":
        print(json.dumps(vars(completion), ensure_ascii=False), flush=True)
