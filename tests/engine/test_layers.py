"""Which layers the stages get: SiPipe's cut, vLLM's, or the user's; no engine is started."""

import os

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.config import SiPipeConfig
from sipipe.engine import arguments
from sipipe.engine.layers.choose import VARIABLE, choose_layers
from sipipe.errors import ConfigError
from sipipe.tools.make_model.checkpoint import make_model
from sipipe.worker.world import cut_model


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory):
    """Two stages, eight layers under a vocabulary of 151,936; only the config is read."""
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    directory = make_model("llama", tmp_path_factory.mktemp("models") / "llama", size="bench")
    args = arguments.parse_engine_args([str(directory), "-pp", "2", "--max-model-len", "256"], {})
    create = arguments.AsyncEngineArgs.from_cli_args(args).create_engine_config
    return arguments.checked(create, str(directory))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def choose(engine_config, by_cost=True, **settings):
    return choose_layers(engine_config, SiPipeConfig.from_dict(settings), by_cost=by_cost)


def test_the_last_stage_gets_fewer_for_its_projection(engine_config):
    assert choose(engine_config) == (7, 1)
    assert choose(engine_config, layers="auto") == (7, 1)


def test_vllms_cut_where_it_was_asked_for_or_its_own_path_is_taken(engine_config):
    assert choose(engine_config, layers="even") == (4, 4)
    assert choose(engine_config, by_cost=False) == (4, 4)


def test_the_users_cut(engine_config, monkeypatch):
    assert choose(engine_config, layers=[7, 1]) == (7, 1)
    assert choose(engine_config, by_cost=False, layers=[7, 1]) == (7, 1)
    monkeypatch.setenv(VARIABLE, "5,3")
    assert choose(engine_config) == (5, 3)


@pytest.mark.parametrize("layers", [[8], [4, 3], [2, 2, 4]])
def test_a_cut_that_does_not_fit_is_refused_by_name(engine_config, layers):
    with pytest.raises(ConfigError, match='"layers" must have one number for each of the 2 stages'):
        choose(engine_config, layers=layers)


def test_two_cuts_are_one_too_many(engine_config, monkeypatch):
    monkeypatch.setenv(VARIABLE, "4,4")
    with pytest.raises(ConfigError, match=f'"layers" and {VARIABLE} both'):
        choose(engine_config, layers=[4, 4])
    monkeypatch.setenv(VARIABLE, "4,3")
    with pytest.raises(ConfigError, match=VARIABLE):
        choose(engine_config)


def test_a_worker_tells_vllm_the_cut(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what the call sets is undone
    monkeypatch.delenv(VARIABLE)
    cut_model((6, 2))
    assert os.environ[VARIABLE] == "6,2"
