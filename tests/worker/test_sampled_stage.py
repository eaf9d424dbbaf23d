"""Hidden states between a stage's links and vLLM's runner."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.projection.projection import Projection  # noqa: E402
from sipipe.worker.sampled_stage import SampledStage  # noqa: E402

WIDTH = 3


def receive(came, room, tokens):
    """What the runner gets of the tensors that ``came``, where its model has made ``room``."""
    inputs = ModelInput(iteration=7, slot=0, buffer_set=0, output=None, num_tokens=tokens)
    released = []
    runner = SimpleNamespace(intermediate_tensors=SimpleNamespace(tensors=room))
    stage = SimpleNamespace(
        double_buffer=SimpleNamespace(running=""),
        _around=SimpleNamespace(runner=runner, record=lambda *_: None),
        _device=SimpleNamespace(mark=lambda: "mark"),
        _launched=SimpleNamespace(inputs=inputs, first=None),
        _links=SimpleNamespace(take=lambda *_: came, release=released.append),
        _projection=Projection(),
    )
    taken = SampledStage._receive(stage)  # noqa: SLF001 - vLLM's runner calls it
    assert released == [7]
    return taken


@pytest.mark.parametrize("tokens", [1, 4])
def test_hidden_states_come_to_the_runners_own_buffers(tokens):
    room = {key: torch.zeros(4, WIDTH) for key in ("hidden_states", "residual")}
    came = {
        "hidden_states": torch.randn(tokens, WIDTH),
        "residual": room["residual"][:tokens],  # in place, as a long prompt's
    }
    room["residual"][:tokens] = 2.0
    taken = receive(came, room, tokens)
    assert taken is room
    assert torch.equal(taken["hidden_states"][:tokens], came["hidden_states"])
    assert (taken["residual"][:tokens] == 2.0).all()
    assert not taken["hidden_states"][tokens:].any()


def test_tensors_for_which_a_model_makes_no_room_are_left_out():
    """As vLLM's runner does: it hands a later stage those that it has room for."""
    room = {"hidden_states": torch.zeros(2, WIDTH)}
    came = {"hidden_states": torch.ones(2, WIDTH), "more": torch.ones(2, 5)}
    taken = receive(came, room, 2)
    assert list(taken) == ["hidden_states"]
    assert taken["hidden_states"].all()
