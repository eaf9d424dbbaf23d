"""Generated checkpoints: deterministic, complete, and what transformers and safetensors expect."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.make_model.checkpoint import make_model
from benchmarks.make_model.families import FAMILIES, SIZES

from sipipe.cli.make_model import main
from sipipe.errors import ConfigError, ResourceError
from sipipe.tools import smollm2

torch = pytest.importorskip("torch", reason="torch, which comes with vLLM, is not installed")
transformers = pytest.importorskip("transformers", reason="it comes with vLLM")
load_file = pytest.importorskip("safetensors.torch").load_file


def digest(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


@pytest.mark.slow
def test_the_same_arguments_give_the_same_bytes_in_any_process(tmp_path):
    here = make_model("llama", tmp_path / "here", seed=3)
    code = "import sys; from benchmarks.make_model.checkpoint import make_model; make_model('llama', sys.argv[1], seed=3)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=60)
    assert digest(here) == digest(tmp_path / "there")


def test_a_second_call_leaves_a_finished_checkpoint_alone(tmp_path):
    path = make_model("llama", tmp_path / "model")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_model("llama", tmp_path / "model") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    make_model("llama", tmp_path / "model", layers=2)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("family", "place", "arguments", "words"),
    [
        ("llama", "", {}, "is there already; name a new or empty directory"),
        ("llama", "precious.txt", {}, "is there already"),
        ("lama", "model", {}, "known: llama, qwen2"),
        ("llama", "model", {"size": "huge"}, "known: tiny, bench"),
        ("mixtral", "model", {"size": "qwen2.5-0.5b"}, "a mixture of experts"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_files_alone(tmp_path, family, place, arguments, words):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match=words) as caught:
        make_model(family, tmp_path / place, **arguments)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious.txt"]


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ResourceError, match=r"cannot write to .*: File name too long"):
        smollm2.place(tmp_path / ("x" * 300), 1, lambda _: None)


def test_an_empty_directory_that_is_there_is_filled(tmp_path, monkeypatch):
    """It may be a volume, or the one that the shell is in: nothing can take its place."""
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    smollm2.place(Path("."), 1, lambda scratch: (scratch / "config.json").write_text("{}"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
    assert tmp_path.stat().st_ino == before


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    full = SimpleNamespace(free=1_000_000)
    monkeypatch.setattr("sipipe.tools.smollm2.shutil.disk_usage", lambda path: full)
    with pytest.raises(ResourceError, match="free some space"):
        make_model("llama", tmp_path / "model")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_tensor_and_finds_context_in_it(tmp_path, family):
    path = make_model(family, tmp_path / "model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values())
    shape = SIZES["tiny"]
    assert model.config.num_hidden_layers == shape.layers
    assert model.config.vocab_size == shape.vocab
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    rows = [tokenizer(text).input_ids[-6:] for text in ("we read the text.", "they ate a text.")]
    rows = [[3 + index] * (6 - len(row)) + row for index, row in enumerate(rows)]
    logits = model(torch.tensor(rows)).logits
    assert 2.0 < logits.std() < 4.5
    assert torch.isfinite(logits).all()
    # The last token is the same, the context is not.
    assert rows[0][-1] == rows[1][-1]
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 0.5


@pytest.mark.slow
def test_the_trained_model_is_unpacked(tmp_path):
    try:
        smollm2.find()
    except ResourceError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path / "model"
    assert main(["smollm2", str(path)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    prompt = getattr(prompt, "input_ids", prompt)
    model = AutoModelForCausalLM.from_pretrained(path)
    answer = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert sum(tensor.nbytes for tensor in model.bfloat16().parameters()) < smollm2.BYTES
    with pytest.raises(ConfigError, match="is there already"):
        main(["smollm2", str(path)])
