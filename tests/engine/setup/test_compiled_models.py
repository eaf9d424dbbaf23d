"""The directory of compiled models is looked at before anything starts, by every door."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.config import CompilationMode

from sipipe.engine.setup.compiled_models import check_compiled_models
from sipipe.errors import ConfigError
from sipipe.worker.hooks import vllm_workers

PARTS = ("", "torch_compile_cache", "torch_compile_cache/torch_aot_compile")


def configured(mode=CompilationMode.VLLM_COMPILE):
    return SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))


@pytest.fixture
def root(monkeypatch, tmp_path):
    root = tmp_path / "vllm"
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(root), raising=False)
    check_compiled_models(configured())
    assert all((root / part).is_dir() for part in PARTS)
    return root


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("trap", ["foreign", "open", "read only"])
def test_what_others_can_write_or_nobody_can_is_refused_by_name(monkeypatch, root, part, trap):
    target = root / part
    if trap == "open":
        target.chmod(0o777)
        message = r"can be written by others"
    elif trap == "read only":
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != target)
        message = r"cannot be written"
    else:
        look = Path.stat

        def foreign(path, **how):
            fields = list(look(path, **how))
            fields[4] = 12 if path == target else os.geteuid()  # st_uid
            return os.stat_result(fields)

        monkeypatch.setattr(Path, "stat", foreign)
        message = r"is another user's \(12\)"
    with pytest.raises(
        ConfigError, match=f"^VLLM_CACHE_ROOT {root}: {target} {message}"
    ) as refused:
        check_compiled_models(configured())
    assert "\n" not in str(refused.value)
    check_compiled_models(configured(CompilationMode.NONE))  # nothing is kept there


def test_a_file_in_its_place_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path / "vllm"), raising=False)
    (tmp_path / "vllm").touch()
    with pytest.raises(ConfigError, match=r"vllm cannot be made \(File exists\)"):
        check_compiled_models(configured())


def test_a_compiled_model_is_named_by_the_layers_that_a_head_reads():
    """vLLM names it by its configuration, in which workers have no drafts."""

    def named(method, layers, eagle=None):
        config = SimpleNamespace(additional_config={"sipipe": {}})
        hf_config = SimpleNamespace(eagle_config=eagle or {})
        speculative = SimpleNamespace(
            method=method,
            draft_model_config=SimpleNamespace(hf_config=hf_config),
            compute_hash=lambda: f"{method} {layers}",
        )
        vllm_workers.name_taps(config, speculative)
        return config.additional_config

    plain = {"sipipe": {}}
    assert named("eagle", [1]) == plain
    assert named("eagle3", [1], {"use_aux_hidden_state": False}) == plain
    assert named("eagle3", [1]) == named("eagle3", [1]) != plain
    assert named("eagle3", [1]) != named("eagle3", [2])


def test_a_compiled_model_that_others_can_have_written_is_not_loaded(monkeypatch, tmp_path):
    """vLLM says what is raised, and compiles anew."""
    loaded = []

    def load(file, **_):
        loaded.append(file.name)
        return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=load))

    monkeypatch.setattr(vllm_workers.torch.compiler, "load_compiled_function", load)
    vllm_workers.use_compiled(SimpleNamespace(additional_config={}), natively=False)
    finished = vllm_workers.torch.compiler.load_compiled_function
    file = tmp_path / "model"
    file.touch(mode=0o644)
    with file.open("rb") as opened:
        finished(opened, f_globals={})
    file.chmod(0o666)
    with (
        file.open("rb") as opened,
        pytest.raises(PermissionError, match=r"others can have .*model"),
    ):
        finished(opened, f_globals={})
    file.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if os.getuid() == 0:  # else it is another user's by now
        os.chown(file, 12, -1)
    with file.open("rb") as opened, pytest.raises(PermissionError):
        finished(opened, f_globals={})
    assert loaded == [str(file)]
