"""Whether an engine names the cut that would have been best for what it served, and only then."""

import itertools
import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engines import engine_environment, model
from tests.programs import ran

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.config import SiPipeConfig
from sipipe.engine.layers import choose, served_cut
from sipipe.engine.layers.cut import cut_layers, kv_lost, layer_split, measured_cut
from sipipe.engine.layers.vocabulary import Vocabulary
from sipipe.observe.live import LivePage, PageHeader
from sipipe.observe.phases import Phase
from sipipe.tools.planner.models import load_model

SMALL = load_model("qwen2.5-0.5b")


def every_cut(layers, p):
    for ends in itertools.combinations(range(1, layers), p - 1):
        bounds = (0, *ends, layers)
        yield tuple(end - first for first, end in itertools.pairwise(bounds))


def times(layers, layer_seconds, behind):
    """Seconds of each stage, the last with what is behind its layers."""
    stages = [count * seconds for count, seconds in zip(layers, layer_seconds, strict=True)]
    stages[-1] += behind
    return stages


@settings(deadline=None)
@given(st.data(), st.integers(2, 3), st.floats(0.0, 50.0), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_no_cut_that_is_allowed_would_have_been_quicker(data, p, behind, kv_loss):
    """All layers of this model are alike, so a layer of a stage takes what each of its others do."""
    layer_seconds = data.draw(st.lists(st.floats(0.5, 2.0), min_size=p, max_size=p))
    layers = cut_layers(SMALL, p, device="cpu", kv_loss=kv_loss)
    seconds = [count * each for count, each in zip(layers, layer_seconds, strict=True)]
    cut, quicker = measured_cut(SMALL, layers, seconds, behind, device="cpu", kv_loss=kv_loss)

    allowed = [c for c in every_cut(SMALL.layers, p) if kv_lost(SMALL, c) <= kv_loss + 1e-9]
    best = min(max(times(c, layer_seconds, behind)) for c in (*allowed, layers))
    mine = max(times(cut, layer_seconds, behind))
    assert mine == pytest.approx(best)
    assert quicker == pytest.approx(max(times(layers, layer_seconds, behind)) / mine)
    assert quicker >= 1


def test_what_was_assumed_needs_no_other_cut():
    layers = cut_layers(SMALL, 2, device="cpu")
    assert layers != layer_split(SMALL.layers, 2)
    # As long as was assumed: 14 layers as long as 10 and the projection.
    cut, quicker = measured_cut(SMALL, layers, [14.0, 10.0], 4.0, device="cpu")
    assert (cut, quicker) == (layers, 1.0)


def engine(vllm_config=None, *, layers=(14, 10), reason="", parts=(), **config):
    """The part of a setup that the comparison reads."""
    vllm_config = vllm_config or SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=None
    )
    return SimpleNamespace(
        vllm_config=vllm_config,
        config=SiPipeConfig.from_dict(config),
        decoder=SimpleNamespace(facts=SMALL),
        stages=len(layers),
        layers=layers,
        reason=reason,
        vocabulary=Vocabulary(parts=parts),
    )


@pytest.fixture
def page():
    page = LivePage.create(PageHeader(stages=2, samplers=1))
    yield page
    page.close()


@pytest.fixture
def serve(page, monkeypatch):
    """Returns a function that gives an engine a second's pass after the other to count, and looks after
    each as the engine does."""
    monkeypatch.setattr(served_cut, "stored_cut", lambda _: None)
    monkeypatch.setattr(choose, "_memory", lambda _: float("inf"))
    monkeypatch.setattr(choose, "device_kind", lambda: "cpu")
    writers = [page.writer("stage", stage) for stage in (0, 1)]

    def serve(look, passes, seconds, behind):
        for number in range(passes):
            for writer, took in zip(writers, seconds, strict=True):
                writer.phase(Phase.FORWARD, number, 0, int(took * 1e9), 1, 1)
            writers[1].phase(Phase.LOGITS, number, 0, int(behind * 1e9), 1, 1)
            look()

    return serve


def test_chats_are_told_of_another_cut_once(page, serve, caplog):
    """Prompts need few products with the output projection: with an even cut the first stage has less to
    do."""
    look = served_cut.compare_cuts(engine(), page)
    serve(look, served_cut.EVERY, [0.14, 0.10], 0.001)
    assert not caplog.messages  # 9 seconds say nothing
    serve(look, 100 * served_cut.EVERY, [0.14, 0.10], 0.001)
    [line] = set(caplog.messages)
    assert "12, 12 would be 1.16 x as quick" in line
    assert "as 14, 10" in line
    assert '"layers": [12, 12]' in line


def test_a_cut_that_fits_is_not_spoken_of(page, serve, caplog):
    look = served_cut.compare_cuts(engine(), page)
    serve(look, 100 * served_cut.EVERY, [0.14, 0.10], 0.04)
    assert not caplog.messages


def test_another_mix_of_requests_gets_other_cuts(page, serve, caplog):
    """Chats first, then requests that decode alone: the more of these, the fewer layers the last stage
    should have."""
    look = served_cut.compare_cuts(engine(kv_loss=0.5), page)
    serve(look, 10 * served_cut.EVERY, [0.14, 0.10], 0.001)
    serve(look, 1000 * served_cut.EVERY, [0.14, 0.10], 0.1)
    named = [re.search(r"so far, (\d+), ", line)[1] for line in dict.fromkeys(caplog.messages)]
    assert named == ["12", "15", "16", "17"]


@pytest.mark.parametrize(
    "setup",
    [
        engine(layers=(24,)),
        engine(layers=(12, 12)),
        engine(reason="a processor of the user's"),
        engine(parts=(0.5, 0.5)),
    ],
    ids=["one stage", "the user's", "the device draws", "shared out"],
)
def test_where_nothing_can_be_said(setup, page, serve, caplog):
    if setup.layers == (12, 12):
        setup.config = SiPipeConfig.from_dict({"layers": [12, 12]})
    look = served_cut.compare_cuts(setup, page)
    serve(look, 100 * served_cut.EVERY, [0.24, 0.10], 0.0)
    assert not caplog.messages


def test_a_draft_head_is_in_no_phase(page, serve, caplog, monkeypatch):
    monkeypatch.setattr(served_cut, "head_of", lambda _: object())
    look = served_cut.compare_cuts(engine(), page)
    serve(look, 100 * served_cut.EVERY, [0.24, 0.10], 0.0)
    assert not caplog.messages


SERVES = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
if __name__ == "__main__":
    from sipipe.engine.layers import served_cut
    served_cut.ENOUGH = 0.001
    served_cut.EVERY = 1
    served_cut.cut_for_times = lambda *_: ((3, 1), 1.5)
    import sipipe
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], pipeline_parallel_size=2, dtype="float32", max_model_len=256,
              enforce_eager=True, distributed_executor_backend=sipipe.Executor)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=24, ignore_eos=True),
                 use_tqdm=False)
"""


@pytest.mark.engine
@pytest.mark.ci
def test_an_engine_says_it(models, tmp_path):
    script = tmp_path / "serves.py"
    script.write_text(SERVES)
    done = ran([sys.executable, script, model(models)], env=engine_environment(), timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("for what was served so far, 3, 1 would be 1.50 x as quick") == 1
