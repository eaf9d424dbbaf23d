"""A trained draft head: what the model wrote, what the head learns from it, and its checkpoint."""

import json

import pytest

pytest.importorskip("vllm", reason="torch, transformers and safetensors come with it")

import torch
from benchmarks.make_model import eagle
from benchmarks.make_model.checkpoint import make_model
from safetensors.torch import load_file
from tests.engine import heads
from transformers import AutoModelForCausalLM, AutoTokenizer

from sipipe.errors import ConfigError

TOKENS = 24
TOGETHER = 8


@pytest.fixture(autouse=True, scope="module")
def few_together():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle, "TOGETHER", TOGETHER)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heads.target(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder):
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def texts(model, folder):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return list(eagle.write(model, tokenizer, 2 * TOGETHER, TOKENS))


def test_hidden_states_are_the_models_own_and_tokens_its_greedy_ones(model, texts):
    """By a pass of the model over each text alone, without padding. The second half is drawn."""
    assert len(texts) == 2 * TOGETHER
    lengths = {text.question for text in texts}
    assert len(lengths) > 1, (
        "questions of different lengths are padded when they are asked together"
    )
    for number, text in enumerate(texts):
        assert text.question < len(text.tokens) <= text.question + TOKENS
        if number % 3:
            continue
        hidden = model.model(text.tokens[None]).last_hidden_state[0]
        torch.testing.assert_close(text.hidden, hidden[:-1], rtol=1e-3, atol=1e-3)
        greedy = model.lm_head(hidden[text.question - 1 : -1]).argmax(dim=-1)
        same = greedy == text.tokens[text.question :]
        assert same.all() if number < TOGETHER else not same.all()


def test_a_batch_has_each_positions_next_token_and_its_draft(model, texts):
    chosen = [texts[0], texts[3]]
    embedding = model.get_input_embeddings().weight
    batch = eagle.batch_of(chosen, embedding)
    for row, text in enumerate(chosen):
        positions = len(text.tokens) - 2
        assert torch.equal(batch.embedded[row, :positions], embedding[text.tokens[1:-1]])
        assert torch.equal(batch.hidden[row, :positions], text.hidden[:-1])
        assert torch.equal(batch.following[row, :positions], text.hidden[1:])
        answer = text.tokens[max(text.question, 2) :]
        assert torch.equal(batch.drafts[row][batch.counts[row]], answer)


def test_nothing_behind_a_position_changes_it(model):
    torch.manual_seed(0)
    head = eagle.Head(model.config)
    embedded, hidden, others = torch.randn(3, 2, 12, model.config.hidden_size)
    before = head(embedded, hidden)
    embedded[:, 7:] = others[:, 7:]
    after = head(embedded, hidden)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.ci
def test_a_head_learns_and_its_checkpoint_is_in_the_format_of_published_ones(folder, tmp_path):
    """Names and shapes are those of :func:`tests.engine.heads.eagle`, which vLLM takes."""
    right = [
        eagle.make_head(folder, tmp_path / str(rounds), texts=64, tokens=TOKENS, rounds=rounds)
        for rounds in (1, 12)
    ]
    assert right[1] > max(0.2, 1.2 * right[0]), right
    expected = load_file(heads.eagle(folder.parent) / "model.safetensors")
    made = load_file(tmp_path / "12" / "model.safetensors")
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in expected.items()
    }
    assert {weight.dtype for weight in made.values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    of_head = json.loads((tmp_path / "12" / "config.json").read_text())
    assert of_head == config | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}


def test_a_directory_that_holds_something_is_refused_before_anything_is_trained(folder, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        eagle.make_head(folder, tmp_path, texts=1, tokens=1, rounds=1)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_model_of_another_kind_is_refused(tmp_path):
    qwen = make_model("qwen2", tmp_path / "qwen2")
    with pytest.raises(ConfigError, match="qwen2"):
        eagle.make_head(qwen, tmp_path / "head", texts=1, tokens=1, rounds=1)
