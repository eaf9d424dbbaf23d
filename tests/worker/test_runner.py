"""What the stage runner takes, and that it stamps input buffers in the debug mode; no model."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sipipe.worker.runner import StageRunner  # noqa: E402
from sipipe.worker.support import unsupported_reason  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec  # noqa: E402

from sipipe.messages.places import StagePlace  # noqa: E402
from sipipe.worker.inputs.safety import TokenSafetyError  # noqa: E402
from sipipe.worker.world import PipelineStandIn  # noqa: E402

from .test_prepare import decode_output, fake_vllm_runner, new_output  # noqa: E402

CONFIG = {
    "model_config": {},
    "parallel_config": {"use_ubatching": False},
    "cache_config": {"kv_sharing_fast_prefill": False},
}
RUNNER = {
    "device": torch.device("cpu"),
    "input_batch": object(),
    "uses_mrope": False,
    "lookback_token_ids": None,
    "use_aux_hidden_state_outputs": False,
}


def loaded(spec=FullAttentionSpec, **changes):
    """What the choice looks at of vLLM's runner; ``a__b`` sets ``vllm_config.a.b``."""
    config = {name: dict(fields) for name, fields in CONFIG.items()}
    runner = dict(RUNNER)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            config[part][field] = value
        else:
            runner[name] = value
    parts = {name: SimpleNamespace(**fields) for name, fields in config.items()}
    group = SimpleNamespace(kv_cache_spec=object.__new__(spec))
    return SimpleNamespace(
        vllm_config=SimpleNamespace(**parts),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        **runner,
    )


def test_a_plain_decoder_on_a_cpu_is_taken():
    assert unsupported_reason(loaded()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cuda:0")}, "a cuda device: SiPipe's stage runner runs on CPUs"),
        ({"input_batch": None}, "second model runner"),
        ({"uses_mrope": True}, "M-RoPE"),
        ({"lookback_token_ids": object()}, "earlier token ids"),
        ({"model_config__rswa_window": 4}, "sliding window"),
        ({"parallel_config__use_ubatching": True}, "--enable-dbo"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"use_aux_hidden_state_outputs": True}, "auxiliary"),
        ({"spec": MambaSpec}, "KV cache of kind MambaSpec"),
    ],
)
def test_what_goes_vllms_way_has_a_reason_of_one_line(changes, reason):
    runner = loaded(**changes)
    assert reason in unsupported_reason(runner)
    assert "\n" not in unsupported_reason(runner)


def test_a_stage_without_layers_is_not_taken():
    runner = loaded()
    runner.kv_cache_config.kv_cache_groups = []
    assert unsupported_reason(runner) == "a stage without attention layers"


@pytest.fixture
def checked(monkeypatch):
    """A first stage of two with the safety check on, whose model does nothing."""
    place = StagePlace(stage=0, stages=2, tp_rank=0, tp_size=1)
    monkeypatch.setattr(parallel_state, "_PP", PipelineStandIn(place))
    vllm_runner = fake_vllm_runner()
    vllm_runner.model = lambda **inputs: dict(inputs)
    return StageRunner(vllm_runner, slots=1, sets=2, check_token_safety=True)


def test_the_safety_check_stamps_every_write(checked):
    checked.prepare(new_output("a", "b"), 0, 0, 0)
    with pytest.raises(TokenSafetyError, match=r"which holds iteration 0$"):
        checked.prepare(decode_output("ab", 1, [[5], [6]]), 0, 0, 1)


def test_the_safety_check_stamps_every_read(checked, monkeypatch):
    inputs = checked.prepare(new_output("a", "b"), 0, 1, 0)
    inside = []

    def build(_):
        with pytest.raises(TokenSafetyError, match="which holds iteration 0, being read"):
            checked.prepare(decode_output("ab", 1, [[5], [6]]), 0, 1, 1)
        inside.append(True)
        raise StopIteration

    monkeypatch.setattr(checked.attention, "build", build)
    with pytest.raises(StopIteration):
        checked.forward(inputs)
    assert inside


def test_an_empty_microbatch_touches_no_buffers(checked):
    checked.prepare(new_output("a"), 0, 0, 0)
    inputs = checked.prepare(decode_output("", 1, [], finished="a"), 0, 0, 1)
    assert checked.forward(inputs) is None
