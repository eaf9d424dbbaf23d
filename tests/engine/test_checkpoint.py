"""What is refused of a model's directory before anything loads it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.engine import plugin
from sipipe.engine.checkpoint import check_model
from sipipe.errors import ConfigError


def test_a_directory_is_looked_at_and_not_all_below_it(tmp_path):
    """Which may be a whole disk."""
    deep = tmp_path / "models" / "one"
    deep.mkdir(parents=True)
    (deep / "config.json").write_text("{}")
    check_model(str(deep))
    check_model(str(deep.parent))
    with pytest.raises(ConfigError, match=r"there is no config\.json of a model in it"):
        check_model(str(tmp_path))


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
            plugin._asks_for_us(backend)
    else:
        assert plugin._asks_for_us(backend) is ours
