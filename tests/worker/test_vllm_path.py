"""Hidden states between stages whose vLLM runner pads its batches: real rows alone travel."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.arithmetic_stages import boot_of, place_of  # noqa: E402
from tests.worker.threaded_pipeline import link  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402

from sipipe.worker.links import Links  # noqa: E402
from sipipe.worker.stage import Surroundings, VllmStage  # noqa: E402
from sipipe.worker.world import PipelineStandIn  # noqa: E402

WIDTH, MOST = 6, 16


@pytest.fixture
def stages():
    """Two of vLLM's own path, as its pipeline group sees them, and the receiver's buffer."""
    kept = {key: torch.zeros(MOST, WIDTH) for key in ("hidden_states", "residual")}
    runner = SimpleNamespace(intermediate_tensors=SimpleNamespace(tensors=kept))
    wrapper = SimpleNamespace(
        worker=SimpleNamespace(model_runner=runner), execute_model=lambda _: None
    )
    sender, receiver = link()
    stages, groups = [], []
    for number, ends in enumerate(({"sender": sender}, {"receiver": receiver})):
        place = place_of(number, 2)
        groups.append(PipelineStandIn(place))
        with patch.object(parallel_state, "_PP", groups[-1]):
            around = Surroundings(
                boot=boot_of(place), wrapper=wrapper, report=print, recorder=None, fail=print
            )
            stages.append(VllmStage(around, Links(place, **ends)))
    yield stages, groups, kept
    sender.close()
    receiver.close()


def test_each_stage_pads_as_its_own_graphs_want_it(stages):
    stages, groups, kept = stages
    for tokens, padded in [(5, 8), (3, 3), (11, 16), (1, 2), (5, 8)]:
        for stage in stages:
            stage.execute(SimpleNamespace(total_num_scheduled_tokens=0))
            stage.execute(SimpleNamespace(total_num_scheduled_tokens=tokens))
        result = {key: torch.randn(padded, WIDTH) for key in kept}
        # What vLLM's worker waits for before its next step may overwrite the result.
        wait = groups[0].send(result)
        found = groups[1].receive()
        wait()
        assert found is kept, "in the buffer that the runner's graphs read, which has rows to pad"
        for key, tensor in result.items():
            assert torch.equal(found[key][:tokens], tensor[:tokens])
            # As vLLM's runners take it, with its own padding: onto itself.
            found[key][:MOST].copy_(found[key][:MOST])
