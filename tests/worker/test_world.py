"""What vLLM would share between stages because each is a world of its own."""

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from vllm.model_executor.warmup import flashinfer_autotune_cache

from sipipe.messages.places import StagePlace
from sipipe.worker import world


def test_each_stage_tunes_for_itself(monkeypatch, tmp_path):
    """vLLM's own lookup: two stages of equal configurations have files of their own, each the same at
    its next start."""
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flashinfer_autotune_cache, "flashinfer_autotune_cache_hash", lambda _: "h")
    found = []
    for stage in (0, 1, 0):
        with monkeypatch.context() as process:
            process.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
            world.keep_caches_apart(StagePlace(stage=stage, stages=2, tp_rank=0, tp_size=1))
            found.append(flashinfer_autotune_cache.resolve_flashinfer_autotune_file(None))
    assert found[0] == found[2] != found[1]
    assert all(tmp_path in path.parents for path in found)
