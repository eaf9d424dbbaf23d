"""Where compiled kernels are kept: by sources, versions and CPU, and never where others can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sipipe import jit as _jit


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SIPIPE_CACHE_DIR", str(tmp_path / "named"))
    for cached in (_jit.cache_key, _jit.cache_directory):
        cached.cache_clear()
    yield
    for cached in (_jit.cache_key, _jit.cache_directory):
        cached.cache_clear()


def test_another_cpu_has_another_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = _jit.cache_directory()
    assert here.parent == tmp_path / "named" / "kernels"
    for name in ("get_host_cpu_name", "get_host_cpu_features"):
        with monkeypatch.context() as other:
            answer = "znver9" if name == "get_host_cpu_name" else {"avx512f": False}
            features = type("Features", (dict,), {"flatten": lambda self: str(dict(self))})
            given = answer if isinstance(answer, str) else features(answer)
            other.setattr(_jit.binding, name, lambda given=given: given)
            _jit.cache_key.cache_clear()
            _jit.cache_directory.cache_clear()
            assert _jit.cache_directory() != here


def test_a_place_that_cannot_be_written_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SIPIPE_CACHE_DIR", str(blocked))
    monkeypatch.setattr(_jit.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    directory = _jit.cache_directory()
    assert directory.is_relative_to(tmp_path / "tmp")
    assert directory.stat().st_uid == os.getuid()
    assert directory.stat().st_mode & 0o077 == 0
