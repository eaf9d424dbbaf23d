"""A later stage's model that leaves a tensor unread ends the start; one that misses an argument gets it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.sequence import IntermediateTensors

from sipipe.errors import UnsupportedError
from sipipe.worker.hooks import stage_tensors
from sipipe.worker.hooks.preparation import TokenFeedback
from sipipe.worker.hooks.stage_tensors import check_reads, hand_on


class Reads(torch.nn.Module):
    """A later stage that reads as ``way`` says, in a part that vLLM compiles."""

    def __init__(self, way) -> None:
        super().__init__()
        self.way = way
        self.compiled = torch.nn.Identity()
        self.compiled.do_not_compile = False

    def forward(self, intermediate_tensors=None):
        assert self.compiled.do_not_compile, "what is compiled is not traced again"
        return self.way(intermediate_tensors)


class Runner:
    """As much of vLLM's runner as a check needs."""

    is_first_pp_rank = False
    max_num_tokens = 8
    device = torch.device("cpu")
    execute_model_state = None
    pp_handler = None

    def __init__(self, model, *keys: str) -> None:
        self.model = model
        self.intermediate_tensors = IntermediateTensors({key: torch.ones(8, 4) for key in keys})

    def get_model(self):
        return self.model

    def _dummy_run(self, tokens, *, skip_attn, is_profile):
        assert skip_attn
        assert is_profile
        self.execute_model_state = self.model(
            intermediate_tensors=self.intermediate_tensors[:tokens]
        )


def by_name(tensors):
    return tensors["hidden_states"] + tensors["residual"]


WAYS = {
    "by name": by_name,
    "of rows": lambda tensors: by_name(tensors[:2]),
    "of the dict": lambda tensors: [tensors.tensors[key] for key in tensors.tensors],
    "if it is there": lambda tensors: [
        tensors.tensors.get("residual"),
        tensors.tensors.pop("hidden_states"),
    ],
    "all of them": lambda tensors: dict(tensors.items()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_read_is_noted(way):
    runner = Runner(Reads(way), "hidden_states", "residual")
    check_reads(runner)
    assert runner.execute_model_state is None
    assert runner.model.compiled.do_not_compile is False
    runner.model.compiled.do_not_compile = True
    runner.model.way = lambda tensors: tensors
    tensors = runner.intermediate_tensors
    assert runner.model(intermediate_tensors=tensors) is tensors, "nothing is noted any more"


@pytest.mark.parametrize("way", [by_name, lambda tensors: by_name(tensors[:2])])
def test_an_unread_tensor_ends_the_start_with_its_name_and_the_models(way):
    runner = Runner(Reads(way), "hidden_states", "residual", "per_layer_inputs")
    with pytest.raises(UnsupportedError, match=r"^Reads: a later stage .* read 'per_layer_inputs'"):
        check_reads(runner)
    runner.is_first_pp_rank = True
    check_reads(runner)  # it is sent nothing


def test_what_the_runner_hands_on_past_the_model_is_not_unread():
    """Hidden states that a head on the last stage reads, on a stage between."""
    keys = "hidden_states", "residual", "aux_hidden_states_0"
    runner = Runner(Reads(by_name), *keys)
    with pytest.raises(UnsupportedError, match="aux_hidden_states_0"):
        check_reads(runner)
    runner.pp_handler = TokenFeedback(4)
    runner.pp_handler.relayed = ("aux_hidden_states_0",)
    check_reads(runner)
    sent = IntermediateTensors({"hidden_states": torch.zeros(8, 4)})
    handed_on = runner.pp_handler.relay_aux_hidden_states(runner.intermediate_tensors, sent)
    assert list(handed_on.tensors) == ["hidden_states", "aux_hidden_states_0"]
    assert handed_on["aux_hidden_states_0"] is runner.intermediate_tensors["aux_hidden_states_0"]


def test_an_argument_is_passed_to_later_stages_and_sent_on(monkeypatch):
    """Two stages of a model whose mask the first one only is given; a text has none."""

    class Masked(torch.nn.Module):
        def forward(self, intermediate_tensors=None, mask=None):
            self.mask = mask
            return IntermediateTensors({"hidden_states": torch.ones(3, 4)})

    monkeypatch.setattr(stage_tensors, "SENT_BY_NOBODY", {"Masked": "mask"})
    first, second = Masked(), Masked()
    later = Runner(second, "hidden_states")
    hand_on(SimpleNamespace(get_model=lambda: first, is_first_pp_rank=True))
    hand_on(later)
    assert later.intermediate_tensors["mask"].shape == (8, 1)
    seen = torch.tensor([[True], [False], [True]])
    second(intermediate_tensors=first(mask=seen))
    assert second.mask.equal(seen)
    third = second(intermediate_tensors=first())
    assert not second.mask.any()
    assert not third["mask"].any()


def test_the_named_models_of_vllm_take_the_argument():
    """As long as they do not read what is sent by themselves."""
    import inspect

    from vllm.model_executor.models import ernie45_vl_moe, gemma4

    for module, table in (
        (gemma4, stage_tensors.READ_BY_NOBODY),
        (ernie45_vl_moe, stage_tensors.SENT_BY_NOBODY),
    ):
        for kind, name in table.items():
            assert name in inspect.signature(getattr(module, kind).forward).parameters
