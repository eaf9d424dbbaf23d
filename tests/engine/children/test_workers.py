"""What workers are started with; their processes are a list."""

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model

from sipipe.engine.children import workers
from sipipe.engine.children.workers import Workers
from sipipe.engine.setup.decide import decide
from sipipe.engine.start import arguments, plugin

if not arguments.current_platform.is_cpu():
    pytest.skip("a CUDA build of vLLM needs its GPU here", allow_module_level=True)


class Children:
    """Keeps what each child would be started with."""

    def __init__(self):
        self.environments = []

    def start(self, name, module, *, ends, environment, begin):
        assert module == "sipipe.worker"
        for end in ends:
            end.close()
        self.environments.append(environment)
        return SimpleNamespace(name=name, say=lambda record: None)


@pytest.mark.parametrize(
    ("visible", "devices", "replica", "seen"),
    [
        ("MIG-a,MIG-b", (0, 1), 0, ["MIG-a", "MIG-b"]),
        ("MIG-a,MIG-b", (1, 0), 0, ["MIG-b", "MIG-a"]),
        ("MIG-a,MIG-b,MIG-c,MIG-d", (0, 1, 2, 3), 1, ["MIG-c", "MIG-d"]),
        ("0,1", (1, 0), 0, ["0,1", "0,1"]),
        ("0,1", None, 0, ["0,1", "0,1"]),
        (None, None, 0, [None, None]),
    ],
)
def test_each_worker_sees_its_own_slice_and_all_of_the_whole_gpus(
    tmp_path, monkeypatch, visible, devices, replica, seen
):
    model = str(make_model("llama", tmp_path / "llama"))
    args = arguments.parse_engine_args([model, "-pp", "2", "--max-model-len", "256"], {})
    setup = decide(plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args)))
    setup.vllm_config.parallel_config.data_parallel_index = replica
    config = setup.config.from_dict({"devices": devices})
    setup = dataclasses.replace(setup, config=config)
    monkeypatch.setattr(workers, "set_multiprocessing_worker_envs", lambda count: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    children = Children()
    started = Workers(children, setup, watched=None)
    started.remove_rendezvous()
    shown = [each.get("CUDA_VISIBLE_DEVICES") for each in children.environments]
    assert shown == seen
