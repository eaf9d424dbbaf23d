"""A byte-level BPE tokenizer trained on the text beside it.

The text teaches a few thousand merges. A larger vocabulary is filled up with made-up words: they
never come out of encoding, but every token id that a random model draws decodes to text.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0, 1, 2: padding and end of a document, start and end of a message."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)


def write_tokenizer(directory: Path, *, vocab: int, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for ``vocab`` ids."""
    trained = json.loads(_trained(min(vocab, 16_384)))
    _fill(trained, vocab)
    (directory / "tokenizer.json").write_text(json.dumps(trained, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@functools.cache
def _trained(vocab: int) -> str:
    """tokenizer.json of a tokenizer trained to at most ``vocab`` ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
    )
    text = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    serialized: str = tokenizer.to_str()
    return serialized


def _fill(tokenizer: dict[str, Any], vocab: int) -> None:
    """Extend the trained vocabulary to ``vocab`` ids with words that the text does not hold."""
    words: dict[str, int] = tokenizer["model"]["vocab"]
    for word in _made_up_words():
        if len(words) >= vocab:
            return
        # In the byte-level alphabet "Ġ" is a space: these tokens start a word.
        words.setdefault("Ġ" + word, len(words))


def _made_up_words() -> Iterator[str]:
    """Distinct pronounceable words, short ones first: 75 * 90, then 75 * 90 * 90."""
    onsets = ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
    first = [onset + vowel for onset in onsets for vowel in "aeiou"]
    rest = [syllable + coda for syllable in first[::5] for coda in ("", "n", "r", "s", "l", "m")]
    for syllables in (1, 2):
        for word in itertools.product(first, *[rest] * syllables):
            yield "".join(word)
