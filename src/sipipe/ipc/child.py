"""Starts a process of ours that ends with this one: :mod:`sipipe.ipc.parent` is its side."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any


def start_child(
    program: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    ends: Sequence[socket.socket | IO[bytes]] = (),
    **options: Any,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python PROGRAM CONTROL END... ARGUMENT...``; returns it, and our end of its control
    socket.

    CONTROL is the number of its own end, which the kernel ends with ours when this process dies
    (:class:`sipipe.ipc.parent.Parent` or :func:`~sipipe.ipc.parent.end_group_with` there).

    Args:
        program: options of Python and what it runs, such as ``("-m", "sipipe.sampler")``.
        ends: more that it takes over, by number; this process lets go of them.
        options: of ``subprocess.Popen``.
    """
    ours, theirs = socket.socketpair()
    given = [theirs, *ends]
    numbers = [end.fileno() for end in given]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-P", *program, *map(str, numbers), *arguments],
            pass_fds=numbers,
            **options,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        for end in given:
            end.close()
    return process, ours
