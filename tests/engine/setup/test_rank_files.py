"""Checkpoints stored by rank: what is missing, half, or of another cut is refused before the start."""

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.choose import VARIABLE, choose_layers, describe_layers
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.setup.rank_files import check_rank_files, stored_cut
from sipipe.engine.start import arguments, plugin
from sipipe.errors import ConfigError


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Two stages of 3 and 1 layers by two ranks; the files have a number for each layer."""
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    monkeypatch.delenv(VARIABLE, raising=False)
    path = make_model("llama", tmp_path / "llama")
    for file in path.glob("*.safetensors"):
        file.unlink()
    for stage, layers in enumerate([(0, 1, 2), (3,)]):
        for rank in range(2):
            names = {f"model.layers.{n}.mlp.weight": np.zeros(2, np.float32) for n in layers}
            save_file(names, path / f"model-pp-{stage}-tp-{rank}-part-0.safetensors")
    words = [str(path), "-pp", "2", "-tp", "2", "--max-model-len", "256"]
    args = arguments.parse_engine_args([*words, "--load-format", "sharded_state"], {})
    made = plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args))
    return path, made


def choose(made, **settings):
    config = SiPipeConfig.from_dict(settings)
    return choose_layers(made, config, decoder_of(made), by_cost=True)


def test_the_stored_cut_is_the_cut(stored):
    _, made = stored
    check_rank_files(made, range(2))
    assert stored_cut(made) == choose(made) == choose(made, layers=[3, 1]) == (3, 1)
    decoder = decoder_of(made)
    line = describe_layers(made, SiPipeConfig(), decoder, (3, 1), by_cost=True)
    assert "3, 1 (" in line
    with pytest.raises(
        ConfigError, match=r'"layers" .* cuts \[2, 2\], but MODEL is stored .*\[3, 1\]'
    ):
        choose(made, layers=[2, 2])
    with pytest.raises(ConfigError, match=r'"layers" "even" cuts \[2, 2\], but MODEL is stored'):
        choose(made, layers="even")


@pytest.mark.parametrize("stages", [(0,), (0, 1)])
@pytest.mark.parametrize("tower", [2, 4, 24])
def test_layers_of_a_vision_tower_are_not_the_decoders(stored, stages, tower):
    """Whichever stages have the tower, and however many layers it has."""
    path, made = stored
    for stage in stages:
        names = [f"vision_tower.encoder.layers.{n}.mlp.weight" for n in range(tower)]
        names.append("multi_modal_projector.layers.0.weight")
        file = path / f"model-pp-{stage}-tp-0-part-1.safetensors"
        save_file({name: np.zeros(2, np.float32) for name in names}, file)
    assert stored_cut(made) == choose(made) == (3, 1)


def test_files_of_each_stage_and_rank_are_there_and_whole(stored):
    path, made = stored
    missing = path / "model-pp-1-tp-1-part-0.safetensors"
    content = missing.read_bytes()
    missing.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"model-pp-1-tp-1-part-0.safetensors.* not whole"):
        check_rank_files(made, range(2))
    missing.unlink()
    check_rank_files(made, range(1))  # another host has the last stage
    with pytest.raises(ConfigError, match=r"no model-pp-1-tp-1-part-.*rank 1 of stage 1 loads"):
        check_rank_files(made, range(2))


def test_what_was_stored_for_more_ranks_is_refused(stored):
    path, made = stored
    more = path / "model-pp-0-tp-2-part-0.safetensors"
    save_file({"x": np.zeros(2, np.float32)}, more)
    with pytest.raises(ConfigError, match="larger --tensor-parallel-size"):
        stored_cut(made)
    more.rename(path / "model-pp-2-tp-0-part-0.safetensors")
    with pytest.raises(ConfigError, match="larger --pipeline-parallel-size"):
        stored_cut(made)


def test_layers_that_are_not_the_models_are_refused(stored):
    path, made = stored
    save_file(
        {"model.layers.2.mlp.weight": np.zeros(2, np.float32)},
        path / "model-pp-1-tp-0-part-0.safetensors",
    )
    with pytest.raises(ConfigError, match="have 3, 1 layers in stages 0 to 1, which are not"):
        stored_cut(made)
