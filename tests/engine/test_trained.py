"""A trained model, SmolLM2-135M-Instruct, through SiPipe as through stock vLLM."""

import json
from itertools import product
from pathlib import Path

import jsonschema
import pytest
from benchmarks import make_model
from tests.engine.engines import assert_stock, greedy, run_engine, shared, stock_results, tokens
from tests.engine.test_features import same_answers

from sipipe import cpu_features
from sipipe.errors import ResourceError
from sipipe.tools import smollm2 as published

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

ASKED = (
    "What is {}?",
    "Write a sentence about {}.",
    "Explain {} to a child.",
    "List three facts about {}.",
    "Who first wrote about {}, and when?",
    "Is {} dangerous? Answer yes or no, then say why.",
    "Write a short poem about {}.",
    "How would you teach {} in one lesson?",
    "Translate '{}' to French.",
    "Write a Python function that prints facts about {}.",
)
OF = (
    *("gravity", "the French Revolution", "photosynthesis", "chess", "the Pacific Ocean"),
    *("bread", "electricity", "Mars", "democracy", "the violin", "volcanoes", "algebra"),
    *("the human heart", "rain", "whales", "printing", "football", "silk", "bees", "glass"),
)
CACHE = {"num_gpu_blocks_override": 96}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"enum": ["old", "new", "big"]}, "maxItems": 3},
    },
    "required": ["name", "year", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2(models):
    try:
        published.find()
    except ResourceError as error:
        pytest.skip(str(error))
    path = models / "smollm2"
    if not path.exists():
        published.make_smollm2(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def chats(tokenizer):
    """200 prompts of 30 to 50 tokens."""
    said = [form.format(subject) for form, subject in product(ASKED, OF)]
    talks = [[{"role": "user", "content": text}] for text in said]
    return tokenizer.apply_chat_template(talks, add_generation_prompt=True)["input_ids"]


@pytest.fixture(scope="module")
def batches(chats, tokenizer):
    """The chats; then a text's log-probabilities."""
    corpus = Path(make_model.__file__).with_name("corpus.txt").read_text()
    scored = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1}
    return [
        {"prompts": chats, "params": greedy(len(chats), longest=32)},
        {"prompts": [tokenizer.encode(corpus)[:400]], "params": [scored]},
    ]


@pytest.mark.parametrize("pp", [2, 5])
def test_200_chats_and_a_texts_logprobs_equal_stock(smollm2, batches, pp):
    found = run_engine(smollm2, batches, **shared(pp), **CACHE)
    assert_stock(found, smollm2, batches, same_answers, **CACHE)


@pytest.mark.skipif(cpu_features.slow(), reason="bfloat16 takes minutes a batch without AVX-512")
def test_bfloat16_agrees_with_stock_as_stock_does_with_itself(smollm2, batches):
    """Products round by batch shape; stock's batches are of 64 and of 8 sequences."""
    options = CACHE | {"dtype": "bfloat16"}
    stock = stock_results(smollm2, batches[:1], **options)
    itself = stock_results(smollm2, batches[:1], **options, max_num_seqs=8)
    found = run_engine(smollm2, batches[:1], **shared(2), **options)
    assert alike(found, stock) >= alike(itself, stock) - 10


def alike(found, stock):
    """Chats with the same tokens to the end."""
    return sum(a == b for a, b in zip(tokens(found[0]), tokens(stock[0]), strict=True))


def test_json_by_schema_is_valid_100_times_of_100(smollm2, chats):
    asked = {"temperature": 1.0, "max_tokens": 120, "structured_outputs": {"json": SCHEMA}}
    params = [{**asked, "seed": seed} for seed in range(100)]
    batch, dense = {"prompts": chats[:100], "params": params}, {"disable_any_whitespace": True}
    # Else some answers are new lines to their end, as the grammar has it.
    options = {"structured_outputs_config": dense | {"backend": "xgrammar"}}
    found = run_engine(smollm2, [batch], **shared(2), **CACHE, **options)
    said = [request["outputs"][0]["text"] for request in found[0]]
    for text in said:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(said)) > 50
