"""Engines that are measured: each in a process of its own, which ends with all that it started."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from sipipe.errors import ConfigError, SiPipeError, one_line, say
from sipipe.ipc.child import start_child
from sipipe.ipc.parent import end_group_with, kill_group
from sipipe.ipc.sockets import own_sockets

TIMEOUT = 3_600.0
"""Seconds that one engine may take before it is stopped, besides those in which requests arrive."""

_NOTED = 8_000  # characters
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_DEFAULTS["PYTHONHASHSEED"] = "0"  # vLLM's timed_trace makes its prompts from a string's hash


def measured(
    side: str,
    job: Mapping[str, Any],
    module: str,
    *,
    descriptors: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Run ``module`` on ``job`` in a process of its own and return the JSON object that it prints.

    Args:
        side: name of the engine in messages.
        job: JSON object that the module reads from its standard input.
        module: module to run, such as :mod:`sipipe.tools.load`.
        descriptors: open files that the process takes over.
        env: environment variables on top of this process's.
        timeout: seconds after which the process is ended.

    Raises:
        ConfigError: it refused an option.
        SiPipeError: it failed, or took more than ``timeout`` seconds. Its log is kept in a file, and
            the end of the log is the error's note.
    """
    say(f"measuring {side} …")
    with _log_file(side) as log, own_sockets():
        # A session of its own, so that it can be ended with all the engine's processes.
        process, control = start_child(
            ("-m", module),
            ends=[os.fdopen(descriptor, "rb") for descriptor in descriptors],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_DEFAULTS | dict(os.environ) | dict(env or {}),
            start_new_session=True,
        )
        out: bytes | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                # wait: `timeout`; the engine's answer or end
                out, _ = process.communicate(json.dumps(job).encode(), timeout=timeout)
        finally:
            _end(process)
            kill_group(process.pid)  # what it has left, such as a server that hangs
            control.close()
        log.seek(0)
        output = log.read()
    if out is not None and process.returncode == 0:
        return dict(json.loads(out))
    text = output.decode(errors="replace")
    if out is not None and process.returncode == 2 and text.strip():  # its word on a wrong option
        raise ConfigError(text.strip().splitlines()[-1])
    why = f"took more than {timeout:.0f} s" if out is None else f"failed: {_keep(side, output)}"
    error = SiPipeError(f"{side} {why}")
    error.add_note(text[-_NOTED:])
    raise error


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be the other end of :func:`measured`: do ``work`` on the job from stdin, its result to stdout."""
    end_group_with(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGTERM, _end_with_all)  # its parent, told to end too, ends no group then
    # Only the result may go to stdout; engines and clients print there too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        result = work(json.load(sys.stdin))
    except ConfigError as error:
        say(str(error))
        sys.exit(2)
    except SiPipeError as error:
        sys.exit(f"SiPipeError: {error}")
    out.write(json.dumps(result) + "\n")
    out.close()


def _end_with_all(*_: object) -> None:
    kill_group(os.getpgrp())
    os._exit(143)


def _keep(side: str, log: bytes) -> str:
    """Keep a failed engine's log; its first error, which is the cause, and where the log is."""
    prefix = "sipipe-bench-" + re.sub(r"[^\w.-]+", "-", side)[:60]
    place = "its log could not be kept"
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile(prefix=f"{prefix}-", suffix=".log", delete=False) as file,
    ):
        file.write(log)
        file.flush()
        place = f"log: {file.name}"
    # vLLM's warnings quote errors that may come.
    lines = (line for line in log.decode(errors="replace").splitlines() if "WARNING" not in line)
    errors = (re.search(r"\w+(Error|Exception): .*", line) for line in lines)
    first = next(filter(None, errors), None)
    cause = first.group() if first else "no error in its log"
    return f"{cause} ({place})"


def _log_file(side: str) -> IO[bytes]:
    """A file for an engine's log. Raises SiPipeError: there is no room for one."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise SiPipeError(f"{side} has no place for its log: {one_line(error)}") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the measured engine where it still runs: politely first, then for certain."""
    for number, seconds in ((signal.SIGINT, 15.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)  # wait: 15 s, then SIGKILL and 5 s; the engine's end
