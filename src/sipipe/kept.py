"""Small results that one start keeps for the next ones: JSON files in the user's cache directory.

A file is taken only from a directory that nobody else can have written to, as compiled kernels are
(:mod:`sipipe.private`). One that is damaged, or of another type, is none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from sipipe.private import UnusableError, cache_base, private_directory, read_private

T = TypeVar("T")

_MOST_BYTES = 1 << 16


class Folder(Generic[T]):
    """Results of one type, a file for each subject.

    Args:
        name: Name of the folder, below ``SIPIPE_CACHE_DIR``.
        kind: Type of the results, which msgspec can decode.
    """

    def __init__(self, name: str, kind: type[T]) -> None:
        self._name = name
        self._kind = kind

    def load(self, subject: msgspec.Struct) -> T | None:
        """The result for ``subject``; None: there is none that can be taken. Whether it is of this
        subject, and not of another whose name collides, is for the caller to check."""
        try:
            content = read_private(self._directory() / _file_name(subject), _MOST_BYTES)
            return msgspec.json.decode(content, type=self._kind)
        except (OSError, RuntimeError, UnusableError, msgspec.MsgspecError, UnicodeDecodeError):
            return None  # RuntimeError: this user has no home

    def keep(self, subject: msgspec.Struct, result: T) -> None:
        """Keep ``result`` for ``subject``, in place of an earlier one. Raises OSError, RuntimeError,
        UnusableError: it cannot be kept."""
        directory = self._directory()
        number, name = tempfile.mkstemp(dir=directory)  # of this user alone
        try:
            with os.fdopen(number, "wb") as file:
                file.write(msgspec.json.encode(result))
            os.replace(name, directory / _file_name(subject))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _directory(self) -> Path:
        return private_directory(cache_base(), [self._name])


def digest(value: Any) -> str:
    """SHA-256, in hexadecimal digits, of a value that msgspec or ``str`` can write."""
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=str)).hexdigest()


def _file_name(subject: msgspec.Struct) -> str:
    return f"{digest(subject)[:32]}.json"
