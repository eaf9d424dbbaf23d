"""Checks of a model's directory before anything loads it."""

import json
import os
from socket import gaierror

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.numpy import save_file

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.engine.setup.checkpoint import _check_shards, check_model
from sipipe.engine.start import plugin
from sipipe.engine.start.refusals import checked
from sipipe.errors import ConfigError, SiPipeError


def test_a_directory_is_looked_at_and_not_all_below_it(tmp_path):
    """A file server's root may be above a model's directory."""
    deep = tmp_path / "models" / "one"
    deep.mkdir(parents=True)
    (deep / "config.json").write_text("{}")
    check_model(str(deep))
    check_model(str(deep.parent))
    with pytest.raises(ConfigError, match=r"there is no config\.json of a model in it"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 100, -1, None])
def test_a_file_of_weights_that_is_not_whole_is_named(tmp_path, keep):
    """The download broke off, or an index names the file and nobody has downloaded it."""
    for name in ("a.safetensors", "sub/b.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"x": np.zeros((8, 64), np.float32)}, tmp_path / name)
    index = {"weight_map": {"x": "a.safetensors", "y": "sub/b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _check_shards(tmp_path, "auto")
    (tmp_path / "not in the index.safetensors").touch()  # vLLM does not read it
    _check_shards(tmp_path, "auto")
    content = (tmp_path / "sub/b.safetensors").read_bytes()
    (tmp_path / "sub/b.safetensors").unlink()
    if keep is not None:
        (tmp_path / "sub/b.safetensors").write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=r'b\.safetensors" is not there or not whole: down'):
        _check_shards(tmp_path, "auto")
    _check_shards(tmp_path, "pt")
    save_file({"x": np.zeros(8, np.float32)}, tmp_path / "consolidated.safetensors")
    _check_shards(tmp_path, "auto")  # which is Mistral's own format, and complete


@pytest.mark.parametrize("index", ["", "{", "[]", '{"weight_map": 3}', None])
def test_an_index_that_says_nothing_is_left_to_vllm(tmp_path, index):
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    _check_shards(tmp_path, "auto")


def test_a_name_on_the_hub_beside_a_directory_with_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model-8B-Instruct").mkdir(parents=True)
    check_model("org/model-8B")
    with pytest.raises(ConfigError, match="did you mean"):
        check_model("./org/model-8B-Instruc")


def test_what_this_user_may_not_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f'MODEL "{tmp_path}" cannot be read: Permission denied'):
        check_model(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        check_model("/" + "x" * 300)


@pytest.mark.parametrize(
    ("backend", "ours"),
    [
        ("sipipe.Executor", True),
        ("mp", False),
        ("custom.Executor", False),
        ("simple.executor", False),
        ("sipipes.Executor", False),  # is there
        ("sipip.Executor", None),
        ("sipipe_vllm.Executor", None),
        ("SiPipeExecutor", None),
        ("sipipe:Excutor", None),
    ],
)
def test_other_executors_are_no_business_of_ours(tmp_path, monkeypatch, backend, ours):
    (tmp_path / "sipipes.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if ours is None:
        with pytest.raises(ConfigError, match=r"did you mean sipipe\.Executor"):
            plugin.asks_for_sipipe(backend)
    else:
        assert plugin.asks_for_sipipe(backend) is ours


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (gaierror("Name or service not known"), 1),
        (TimeoutError("timed out"), 1),
        (OfflineModeIsEnabled("outgoing traffic is disabled"), 2),
        (None, 2),
    ],
)
@pytest.mark.parametrize("raised", [OSError, ValueError])
def test_a_hub_that_was_not_reached_may_be_reached_next_time(cause, status, raised):
    """Status 2 would have an orchestrator give up for a name server's bad minute."""

    def call():
        try:
            raise LocalEntryNotFoundError("not in the cache") from cause
        except OSError as error:
            raise raised("We couldn't connect\nCheck your connection") from error

    with pytest.raises(SiPipeError, match=r"We couldn't connect$") as caught:
        checked(call, "org/model")
    assert caught.value.status == status
