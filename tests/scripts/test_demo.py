"""scripts/demo.py: without the trained model it says so in a line and takes a random one."""

import importlib.util
from pathlib import Path

from sipipe.errors import ResourceError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


def test_without_the_trained_model_a_random_one_is_made(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    made = []

    def missing(directory):
        raise ResourceError("make-model: smollm2 is not here")

    monkeypatch.setattr(demo, "MODELS", tmp_path)
    monkeypatch.setattr(demo.smollm2, "make_smollm2", missing)
    monkeypatch.setattr(demo.subprocess, "run", lambda command, check: made.append(command))
    assert demo.checkpoint() == tmp_path / "llama-bench"
    assert str(tmp_path / "llama-bench") in made[0]
    assert capsys.readouterr().out.startswith(
        "smollm2 is not here\nA random model is served instead"
    )
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert demo.checkpoint() == tmp_path / "SmolLM2-135M-Instruct"
