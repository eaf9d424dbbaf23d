"""What the rows of benchmarks/split.py differ by; no engine is started."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model
from benchmarks.split import ROWS

from sipipe.engine.setup.decide import decide
from sipipe.engine.start import arguments, plugin

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def setups(tmp_path_factory):
    """Of SiPipe's rows, on a model whose layers a cut by cost would give 7 and 1."""
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    model = make_model("llama", tmp_path_factory.mktemp("models") / "llama", size="bench")
    found = {}
    for name, (settings, options) in ROWS.items():
        if settings is None:
            continue
        argv = [str(model), "-pp", "2", "--max-model-len", "256", *options]
        args = arguments.parse_engine_args(argv, settings | {"kv_loss": 0.5})
        found[name] = decide(plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args)))
    return found


def test_layers_are_even_in_all_rows(setups):
    assert {name: setup.layers for name, setup in setups.items()} == dict.fromkeys(setups, (4, 4))


def test_sipipes_rows_differ_by_who_draws_and_then_by_the_projection(setups):
    assert [setup.path for setup in setups.values()] == ["device", "sipipe", "sipipe"]
    assert [bool(setup.vocabulary.parts) for setup in setups.values()] == [False, False, True]
    for of in ("slots", "stages", "ranks", "microbatch"):
        assert len({getattr(setup, of) for setup in setups.values()}) == 1, of
    assert len({setup.vllm_config.ahead for setup in setups.values()}) == 1
    plans = [setup.cores.workers for setup in setups.values()]
    assert plans[1] == plans[2]


def test_a_row_of_stock_vllm_has_one_extension_more():
    stock = [options for settings, options in ROWS.values() if settings is None]
    assert [options[-1:] for options in stock] == [
        [],
        ["benchmarks.asleep.Readers"],
        ["benchmarks.asleep.ReadersAndLinks"],
    ]
