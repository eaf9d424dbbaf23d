"""Findings of self-tests, kept in the user's cache directory: a file for each subject."""

from __future__ import annotations

import msgspec

from sipipe.kept import Folder

FOLDER = "self-tests"


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


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a self-test that need not be repeated."""

    subject: Subject
    difference: float | None = None
    """Difference of the stages' answers from those of one stage, within what rounding explains;
    None: they were not compared."""
    why: str = ""
    """Reason why they were not."""


_FINDINGS = Folder(FOLDER, Finding)


def load(subject: Subject) -> Finding | None:
    """The finding of an earlier start; None: there is none that can be taken."""
    finding = _FINDINGS.load(subject)
    if finding is None or finding.subject != subject:
        return None
    says_one_thing = (finding.difference is None) == bool(finding.why)
    return finding if says_one_thing else None


def keep(finding: Finding) -> None:
    """Keep a finding for later starts. Raises OSError, RuntimeError, UnusableError: it cannot be."""
    _FINDINGS.keep(finding.subject, finding)
