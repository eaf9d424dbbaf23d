"""Findings of self-tests, kept in the user's cache directory: a file for each subject.

A file is taken only from a directory that nobody else can have written to, as compiled kernels are
(:mod:`sipipe.private`). One that is damaged, or of something else, is none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from sipipe.private import UnusableError, cache_base, private_directory, read_private

FOLDER = "self-tests"
_MOST_BYTES = 1 << 16


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a finding depends on."""

    architecture: str
    implementation: str
    """Name of what the model's class comes from: vLLM itself, its Transformers backend, a plugin."""
    model_config: str
    """SHA-256 of the model's configuration: one architecture has models with and without shared KV
    caches, experts, embeddings for each layer."""
    layers: tuple[int, ...]
    """Decoder layers of each stage."""
    ranks: int
    """Tensor-parallel ranks of each stage."""
    dtype: str
    """Type of activations."""
    quantization: str
    kv_cache_dtype: str
    compiled: bool
    vllm: str
    sipipe: str
    torch: str

    def file_name(self) -> str:
        """The file that keeps the finding."""
        return f"{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]}.json"


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a self-test that need not be repeated."""

    subject: Subject
    difference: float | None = None
    """Difference of the stages' answers from those of one stage, within what rounding explains;
    None: they were not compared."""
    why: str = ""
    """Reason why they were not."""


def load(subject: Subject) -> Finding | None:
    """The finding of an earlier start; None: there is none that can be taken."""
    try:
        file = _directory() / subject.file_name()
        finding = msgspec.json.decode(read_private(file, _MOST_BYTES), type=Finding)
    except (OSError, RuntimeError, UnusableError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    says_one_thing = (finding.difference is None) == bool(finding.why)
    return finding if says_one_thing and finding.subject == subject else None


def keep(finding: Finding) -> None:
    """Keep a finding for later starts. Raises OSError, RuntimeError, UnusableError: it cannot be."""
    directory = _directory()
    number, name = tempfile.mkstemp(dir=directory)  # of this user alone
    try:
        with os.fdopen(number, "wb") as file:
            file.write(msgspec.json.encode(finding))
        os.replace(name, directory / finding.subject.file_name())
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _directory() -> Path:
    return private_directory(cache_base(), [FOLDER])
