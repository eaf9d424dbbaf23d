"""The pass before the first request on CPUs: a few tokens where they load what was compiled."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from torch._inductor import config as inductor
from vllm import envs
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from sipipe import layer_names
from sipipe.worker.hooks import native_launch, vllm_workers

MOST = 2048
NATIVELY = "-natively"


class Runner:
    """A vLLM runner whose model was ``compiled`` before, with its launching or without, or was not (None);
    ``compiler``: whether its launching can be compiled."""

    def __init__(self, compiled, images, most, compiler):
        self.compiled, self.supports_mm_inputs, self.max_num_tokens = compiled, images, most
        self.compiler, self.passes = compiler, []

    def warming_up_model(self):
        launched = NATIVELY if inductor.cpp_wrapper else ""
        self.passes.append(f"{self.max_num_tokens}{launched}")
        if not envs.VLLM_FORCE_AOT_LOAD and launched and not self.compiler:
            raise RuntimeError("arg type PyObject is not yet supported\nby custom_op_wrapper")
        if envs.VLLM_FORCE_AOT_LOAD and self.compiled != launched:
            raise FileNotFoundError("there is no such file")


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ({}, "16"),
        ({"most": 8}, "8"),
        ({"compiled": None}, "16 2048"),
        ({"images": True}, "2048"),
        ({"ranks": 2}, "2048"),
        ({"size": None}, "2048"),
        ({"variable": "VLLM_DISABLE_COMPILE_CACHE"}, "2048"),
        ({"mode": CompilationMode.NONE}, ""),
        ({"mode": CompilationMode.NONE, "size": None}, "2048"),
        ({"natively": True}, "16-natively 16"),
        ({"natively": True, "compiled": NATIVELY}, "16-natively"),
        ({"natively": True, "compiled": None}, "16-natively 16 2048-natively"),
        ({"natively": True, "images": True}, "2048"),
        (
            {"natively": True, "compiled": None, "compiler": False},
            "16-natively 16 2048-natively 2048",
        ),
    ],
)
def test_what_was_compiled_is_loaded_by_a_few_tokens(monkeypatch, given, passes):
    """And else compiled by one pass, with its launching where that is to be; if that cannot be, by
    another."""
    if not current_platform.is_cpu():
        pytest.skip("vLLM's build for another device")
    runner = Runner(
        given.get("compiled", ""),
        given.get("images", False),
        given.get("most", MOST),
        given.get("compiler", True),
    )

    class Worker(vllm_workers.CPUStageWorker):
        """A stage's worker with no more than what decides about the pass."""

        def __init__(self, size, mode):
            self.model_runner = runner
            self.cache_config = SimpleNamespace(kv_cache_memory_bytes=size)
            self.compilation_config = SimpleNamespace(mode=mode)
            self._natively = given.get("natively", False)

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
    assert " ".join(runner.passes) == passes
    assert runner.max_num_tokens == most
    assert not envs.VLLM_FORCE_AOT_LOAD
    assert not inductor.cpp_wrapper


@pytest.mark.parametrize(
    ("stages", "objects", "natively"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_launching_is_compiled_for_one_stage_whose_layers_have_names(
    monkeypatch, stages, objects, natively
):
    monkeypatch.setattr(native_launch.torch_utils, "_USE_LAYERNAME", objects)
    assert native_launch.may_launch_natively(stages, compiles=True) is natively
    assert layer_names.variables(stages) == ({layer_names.VARIABLE: "0"} if stages == 1 else {})
