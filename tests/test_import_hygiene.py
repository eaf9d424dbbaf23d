"""Importing SiPipe changes nothing of a process that runs CUDA code: not torch, not its variables.

vLLM's CPU worker replaces torch's CUDA streams, events and memory figures by stand-ins when it is
imported. On its own platform that is vLLM's business; on any other nothing of SiPipe may do it.
"""

import pkgutil
from pathlib import Path

import pytest

from tests.worker.test_imports import loaded_after

pytest.importorskip("vllm", reason="vLLM is not installed")

PACKAGE = Path(__file__).parents[1] / "src" / "sipipe"

PROBE = """
import importlib, os
from vllm import platforms
# As on a machine with GPUs, so far as modules can tell when they are imported.
platforms.current_platform.is_cpu = lambda: False
import torch, vllm, vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu_model_runner

def state():
    found = {"os.environ": dict(os.environ)}
    for holder in (torch, torch.cuda, torch.accelerator, torch.Tensor):
        for name, value in vars(holder).items():
            if callable(value) and not name.startswith("__"):
                found[f"{holder.__name__}.{name}"] = id(value)
    return found

before, said = state(), {}
for module in NAMES:
    importlib.import_module(module)
    after = state()
    changed = sorted(name for name in before if after.get(name) != before[name])
    if changed:
        said[module] = changed
        before = after
import sipipe
sipipe.Executor
before.pop("os.environ"), after.pop("os.environ")
if any(state()[name] != value for name, value in before.items()):
    said["sipipe.Executor"] = ["something"]
assert not said, said
"""


def test_every_module_leaves_torch_and_the_environment_alone(tmp_path):
    found = (module.name for module in pkgutil.walk_packages([str(PACKAGE)], "sipipe."))
    names = [name for name in found if not name.endswith(".__main__")]
    ours = ["sipipe.worker.sampled_stage", "sipipe.worker.hooks.vllm_workers"]
    assert loaded_after(tmp_path, PROBE.replace("NAMES", repr(names)), ours) == ours


def test_engine_options_leave_the_environment_alone(tmp_path):
    """Also those that name SiPipe: which runner its engine takes is nobody else's affair."""
    empty = str(tmp_path)  # of a name the hub would be asked, again and again
    statement = (
        "import os; before = dict(os.environ)\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from sipipe.engine.start import plugin\n"
        "plugin.register()\n"
        f"named = EngineArgs({empty!r}, distributed_executor_backend='sipipe.Executor')\n"
        "try: named.create_engine_config()\n"
        "except Exception: pass\n"
        "assert named.distributed_executor_backend.__name__ == 'Executor'\n"
        "gained = {k: v for k, v in os.environ.items() if before.get(k) != v}\n"
        "assert not [k for k in gained if k.startswith('VLLM_')], gained"
    )
    assert loaded_after(tmp_path, statement, []) == []
