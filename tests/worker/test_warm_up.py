"""The pass before the first request on CPUs: a few tokens where they load what was compiled."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import envs
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from sipipe.worker.hooks import vllm_workers

MOST = 2048


class Runner:
    """A vLLM runner whose model was compiled before, or was not."""

    def __init__(self, compiled, images, most):
        self.compiled, self.supports_mm_inputs, self.max_num_tokens = compiled, images, most
        self.passes = []

    def warming_up_model(self):
        self.passes.append(self.max_num_tokens)
        if not self.compiled and envs.VLLM_FORCE_AOT_LOAD:
            raise FileNotFoundError("there is no such file")


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ({}, [16]),
        ({"most": 8}, [8]),
        ({"compiled": False}, [16, MOST]),
        ({"images": True}, [MOST]),
        ({"ranks": 2}, [MOST]),
        ({"size": None}, [MOST]),
        ({"variable": "VLLM_DISABLE_COMPILE_CACHE"}, [MOST]),
        ({"mode": CompilationMode.NONE}, []),
        ({"mode": CompilationMode.NONE, "size": None}, [MOST]),
    ],
)
def test_what_was_compiled_is_loaded_by_a_few_tokens(monkeypatch, given, passes):
    if not current_platform.is_cpu():
        pytest.skip("vLLM's build for another device")
    runner = Runner(
        given.get("compiled", True), given.get("images", False), given.get("most", MOST)
    )

    class Worker(vllm_workers.CPUStageWorker):
        """A stage's worker with no more than what decides about the pass."""

        def __init__(self, size, mode):
            self.model_runner = runner
            self.cache_config = SimpleNamespace(kv_cache_memory_bytes=size)
            self.compilation_config = SimpleNamespace(mode=mode)

        def warm_up(self):
            """Do what vLLM's ``determine_available_memory`` begins with."""
            if self._should_warm_up_model():
                self.model_runner.warming_up_model()

    worker = Worker(given.get("size", 1 << 30), given.get("mode", CompilationMode.VLLM_COMPILE))
    world = SimpleNamespace(world_size=given.get("ranks", 1))
    monkeypatch.setattr(vllm_workers, "get_world_group", lambda: world)
    monkeypatch.setenv(given.get("variable", "UNUSED"), "1")
    most = runner.max_num_tokens
    worker.warm_up()
    assert runner.passes == passes
    assert runner.max_num_tokens == most
    assert not envs.VLLM_FORCE_AOT_LOAD
