"""Refusals of vLLM's as refusals of SiPipe's: one line, with the option's name, and a status.

Who runs here: each process that makes a configuration, before an engine is started.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gaierror
from traceback import walk_tb
from typing import Any, TypeVar

from sipipe.errors import ConfigError, ResourceError, SiPipeError, tell

T = TypeVar("T")

REFUSALS = (
    *(OSError, ValueError, TypeError, RuntimeError, ImportError, LookupError),
    *(AssertionError, AttributeError),
)
"""Errors by which vLLM, and the libraries that read a model for it, refuse a configuration. vLLM asserts
some of what a user may say, such as the name of ``--data-parallel-backend``."""
MOST_VALUE = 60
"""Characters of a wrong value that a sentence repeats."""


def checked(call: Callable[[], T], model: str = "") -> T:
    """Call vLLM's ``call``, and return what it returns; ``model`` is one that it reads.

    Raises ConfigError: vLLM refuses; ResourceError: no hub answers.
    """
    from pydantic import ValidationError
    from vllm.exceptions import VLLMError

    from sipipe.engine.setup.checkpoint import ask_hub

    try:
        ask_hub(model)
        return call()
    except SiPipeError:
        raise
    except ValidationError as error:
        raise ConfigError(_with_option(error.title, error.errors()[0])) from error
    except (*REFUSALS, VLLMError) as error:
        if isinstance(error, AssertionError | AttributeError) and _is_ours(error):
            raise
        refusal = ResourceError if _unreached(error) else ConfigError
        raise refusal(f"{_subject(error, model)}{_first_line(error)}") from error


def _is_ours(error: BaseException) -> bool:
    """Say if SiPipe's own code has raised an error: it is no mistake of a user's."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("sipipe.")


def _subject(error: BaseException, model: str) -> str:
    """The beginning of a sentence whose error does not say what it is about."""
    if isinstance(error, LookupError | TypeError | AttributeError | AssertionError):
        return f"{type(error).__name__}: "
    if model and isinstance(error, OSError):
        return f'MODEL "{model}" cannot be read: '
    return ""


def _unreached(error: BaseException | None) -> bool:
    """Say if a hub was not reached, though it was allowed: the next try may."""
    while error is not None and not isinstance(error, gaierror | ConnectionError | TimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None and not type(error).__module__.startswith("huggingface_hub")


def _with_option(config: str, detail: Any) -> str:
    """Pydantic's sentence on a field of the class ``config``, with the option's name.

    Args:
        detail: One of ``ValidationError.errors()``.
    """
    from vllm import EngineArgs

    line = _first_line(detail["msg"])
    name = ".".join(map(str, detail["loc"][:1]))
    if not name:
        return line
    known = name in EngineArgs.__dataclass_fields__
    option = f"--{name.replace('_', '-')}" if known else f"{config}.{name}"
    return f"{option}: {line}, not {str(detail['input'])[:MOST_VALUE]!r}"


def _first_line(message: object) -> str:
    """The first line of a message; the first two, where the first only announces the second."""
    lines = str(message).removeprefix("Value error, ").strip().split("\n")
    first = lines[0]
    return f"{first} {lines[1].strip()}" if len(lines) > 1 and first.endswith(":") else first


@contextmanager
def in_one_line() -> Iterator[None]:
    """End a command of vLLM's that SiPipe refuses as ``sipipe serve`` ends: with one line and that
    error's status. In Python it is an exception."""
    try:
        yield
    except SiPipeError as error:
        if not is_vllms_command():
            raise
        tell(error)
        sys.exit(error.status)


def is_vllms_command() -> bool:
    """Say if this process is a command of vLLM's, and not one of SiPipe's or a program."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec else Path(getattr(main, "__file__", None) or "").name
    return name.partition(".")[0] == "vllm"


def before_end(words: Sequence[str]) -> Sequence[str]:
    """Those of a command line's ``words`` that may be options: all before ``--``."""
    return words[: words.index("--")] if "--" in words else words


def check_given_once(words: Sequence[str]) -> None:
    """Raise ConfigError if an option of a command line's ``words`` is given as JSON and key by key. vLLM
    would take the keys, and leave the JSON out in silence."""
    options = {word.partition("=")[0].replace("_", "-") for word in before_end(words)}
    for name in sorted(options):
        option, dot, key = name.partition(".")
        if dot and option.startswith("--") and option in options:
            raise ConfigError(
                f"{option} is given as JSON, and {option}.{key} beside it: give all of it as JSON, "
                f"or all as {option}.KEY"
            )
