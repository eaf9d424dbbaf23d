"""Generated checkpoints: deterministic, complete, and what transformers and safetensors expect."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from sipipe.errors import ConfigError
from sipipe.tools.make_model.checkpoint import RECIPE_FILE, make_model
from sipipe.tools.make_model.families import FAMILIES, TensorSpec
from sipipe.tools.make_model.shapes import SIZES
from sipipe.tools.make_model.weights import encode, write_safetensors

pytest.importorskip("tokenizers", reason="tokenizers, which comes with vLLM, is not installed")


def digest(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_the_same_arguments_give_the_same_bytes_in_any_process(tmp_path):
    here = make_model("llama", tmp_path / "here", seed=3)
    code = "import sys; from sipipe.tools.make_model.checkpoint import make_model; make_model('llama', sys.argv[1], seed=3)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=60)
    assert digest(here) == digest(tmp_path / "there")


def test_another_seed_changes_the_weights_only(tmp_path):
    one = digest(make_model("llama", tmp_path / "one", seed=1))
    two = digest(make_model("llama", tmp_path / "two", seed=2))
    assert {name for name in one if one[name] != two[name]} == {"model.safetensors", RECIPE_FILE}


def test_a_second_call_leaves_a_finished_checkpoint_alone(tmp_path):
    path = make_model("llama", tmp_path / "model")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_model("llama", tmp_path / "model") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    make_model("llama", tmp_path / "model", layers=2)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_foreign_files_are_never_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that make-model did not write"):
        make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        make_model("llama", tmp_path / "precious.txt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("family", "arguments", "word"),
    [
        ("lama", {}, 'did you mean "llama"'),
        ("llama", {"size": "huge"}, "known: tiny, bench"),
        ("llama", {"dtype": "fp16"}, "known: float32, float16, bfloat16"),
        ("llama", {"vocab_size": 100}, "--vocab-size must be 259"),
        ("llama", {"layers": 0}, "--layers must be 1"),
        ("llama", {"seed": -1}, "--seed must be 0"),
        ("mixtral", {"size": "qwen2.5-0.5b"}, "use --size tiny or bench"),
    ],
)
def test_a_mistake_gets_one_line_and_no_files(tmp_path, family, arguments, word):
    with pytest.raises(ConfigError) as caught:
        make_model(family, tmp_path / "model", **arguments)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_reads_what_was_drawn(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    specs = [
        TensorSpec("a", (3, 5), 1.0),
        TensorSpec("b", (7,), 0.5, mean=2.0),
        TensorSpec("c", (2,), 1.0, dtype="float32"),
    ]
    path = tmp_path / "model.safetensors"
    assert write_safetensors(path, specs, dtype=dtype, seed=0) == 24
    write_safetensors(tmp_path / "exact.safetensors", specs, dtype="float32", seed=0)
    tensors = safetensors.load_file(path)
    exact = safetensors.load_file(tmp_path / "exact.safetensors")
    assert set(tensors) == {"a", "b", "c"}
    assert tensors["c"].dtype == torch.float32
    for name in "ab":
        assert tensors[name].dtype == getattr(torch, dtype)
        assert torch.equal(tensors[name], exact[name].to(tensors[name].dtype))


def test_bfloat16_rounding_equals_torch():
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    values = generator.standard_normal(100_000, dtype=np.float32)
    # Halfway cases, where rounding to even shows.
    values[:50_000].view(np.uint32)[:] = (values[:50_000].view(np.uint32) & 0xFFFF0000) | 0x8000
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(encode(values, "bfloat16").view(np.int16), expected)


@pytest.mark.parametrize("vocab", [259, 1_000, 5_000])
def test_every_token_id_is_known_and_text_round_trips(tmp_path, vocab):
    from tokenizers import Tokenizer

    path = make_model("llama", tmp_path / "model", vocab_size=vocab)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    assert [tokenizer.id_to_token(i) for i in range(3)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    text = "def f(x):\n    return {'a': x}  # wörld 你好 🚀\t"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]
    if vocab > 300:
        assert len(encoded.ids) < len(text.encode())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_tensor_and_finds_context_in_it(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
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


def test_the_chat_template_is_taken(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_model("qwen2", tmp_path / "m"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
