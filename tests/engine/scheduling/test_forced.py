"""The tokens that a grammar forces: right, bounded, and the grammar as it was; no engine is started."""

import json
import string
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.make_model.tokenizer import write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.utils import choice_as_grammar

from sipipe.engine.scheduling.forced import MANY, ForcedTokens, agreed, few_of

VOCABULARY = 1000
MOST = 16
BACKENDS = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}


@pytest.fixture(scope="module")
def managers(tmp_path_factory):
    """Of each backend what stands for vLLM's manager, with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, vocab=VOCABULARY, max_positions=512)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        ),
        model_config=None,
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
    )
    return {
        name: SimpleNamespace(
            backend=backend(config, tokenizer=tokenizer, vocab_size=VOCABULARY),
            tokenizer=tokenizer,
            reasoner_cls=None,
        )
        for name, backend in BACKENDS.items()
    }


def request_of(grammar, **more):
    asked = SimpleNamespace(grammar=grammar, reasoning_ended=None, **more)
    return SimpleNamespace(request_id="a", structured_output_request=asked)


def choices_grammar(manager, choices):
    if isinstance(manager.backend, XgrammarBackend):
        spec = choice_as_grammar(choices)
        return manager.backend.compile_grammar(StructuredOutputOptions.GRAMMAR, spec)
    return manager.backend.compile_grammar(StructuredOutputOptions.CHOICE, json.dumps(choices))


def allowed_by(manager, grammar):
    bitmask = manager.backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(bitmask, 0)
    return bitmask.numpy().copy()


def bytes_of(manager, tokens):
    """The text of ``tokens``, which may begin and end inside characters."""
    decode = byte_decoder()
    names = manager.tokenizer.convert_ids_to_tokens(tokens)
    return bytes(decode[letter] for name in names for letter in name)


def byte_decoder():
    """The byte of each letter in the names of a byte-level vocabulary, as GPT-2's tokenizer has it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


# Letters whose UTF-8 bytes begin alike, of one to four bytes, and a few of every kind.
LETTERS = st.one_of(
    st.sampled_from("aäåæàéè北京上海市ßü🌶🌷🍕"),
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Cn", "Co")),
)
CHOICES = st.lists(st.text(LETTERS, min_size=1, max_size=12), min_size=1, max_size=4, unique=True)


@pytest.mark.parametrize("backend", BACKENDS)
@given(choices=CHOICES, data=st.data())
@example(choices=["北京市", "上海市"], data=None)
@example(choices=["上海市", "上京"], data=None)
@example(choices=["é", "è"], data=None)
@example(choices=["Grüße 🌶 aus Köln"], data=None)
@settings(max_examples=40, deadline=None)
def test_forced_tokens_begin_what_the_choices_have_next(managers, backend, choices, data):
    """An oracle that knows the choices' bytes, at every state on a random way through the grammar."""
    manager = managers[backend]
    grammar = choices_grammar(manager, choices)
    forced_tokens = ForcedTokens(manager)
    known = [choice.encode() for choice in choices]
    end = manager.tokenizer.eos_token_id
    said = b""
    while not grammar.is_terminated():
        before = allowed_by(manager, grammar)
        tokens = forced_tokens.of(request_of(grammar), MOST)
        assert np.array_equal(allowed_by(manager, grammar), before), "the grammar is as it was"
        inside = [token for token in tokens if token != end]
        assert grammar.validate_tokens(inside) == inside
        left = [choice[len(said) :] for choice in known if choice.startswith(said)]
        common = left[0]
        while not all(choice.startswith(common) for choice in left):
            common = common[:-1]
        text = bytes_of(manager, inside)
        # The longest token may be of some choices only, where the others have none so long.
        assert any(choice.startswith(text) for choice in left)
        assert bool(text) == bool(common)
        assert len(left) > 1 or common.startswith(text)
        assert len(tokens) <= MOST
        allowed = few_of(before[0], VOCABULARY)
        token = data.draw(st.sampled_from(allowed)) if data is not None else allowed[-1]
        assert grammar.accept_tokens("a", [token])
        if token == end:
            break
        said += bytes_of(manager, [token])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_forced_text_costs_as_many_steps_as_there_are_drafts(managers, backend):
    manager = managers[backend]
    grammar = choices_grammar(manager, ["ab" * 1000])
    steps = []
    fill = grammar.fill_bitmask

    def counted(*args):
        steps.append(args)
        fill(*args)

    grammar.fill_bitmask = counted
    assert len(ForcedTokens(manager).of(request_of(grammar), MOST)) == MOST
    assert len(steps) == MOST


def test_a_regex_forces_its_fixed_parts(managers):
    manager = managers["xgrammar"]
    pattern = "Grüße 🌶 aus (Köln|Kiel)"
    grammar = manager.backend.compile_grammar(StructuredOutputOptions.REGEX, pattern)
    forced = ForcedTokens(manager).of(request_of(grammar), 100)
    assert bytes_of(manager, forced) == "Grüße 🌶 aus K".encode()


def test_the_grammar_is_taken_back_where_a_step_fails(managers):
    manager = managers["xgrammar"]
    grammar = choices_grammar(manager, ["abcabcabcabcabc"])
    before = allowed_by(manager, grammar)
    fill, steps = grammar.fill_bitmask, iter([None, None])

    def failing(*args):
        next(steps)  # StopIteration at the third
        fill(*args)

    grammar.fill_bitmask = failing
    with pytest.raises(StopIteration):
        ForcedTokens(manager).of(request_of(grammar), MOST)
    grammar.fill_bitmask = fill
    assert np.array_equal(allowed_by(manager, grammar), before)


def test_nothing_is_forced_while_a_model_reasons_nor_without_a_grammar(managers):
    reasons = SimpleNamespace(**vars(managers["xgrammar"]) | {"reasoner_cls": object})
    request = request_of(choices_grammar(reasons, ["abc"]))
    assert ForcedTokens(reasons).of(request, MOST) == []
    request.structured_output_request.reasoning_ended = True
    assert ForcedTokens(reasons).of(request, MOST)
    request.structured_output_request = None
    assert ForcedTokens(reasons).of(request, MOST) == []


@given(st.sets(st.integers(0, 32 * 8 - 1)))
def test_few_bits_are_found(numbers):
    bits = np.zeros(8, np.uint32)
    for number in numbers:
        bits[number // 32] |= np.uint32(1 << number % 32)
    expected = sorted(numbers) if len(numbers) <= MANY else []
    assert few_of(bits.view(np.int32), MANY) == expected


@given(st.lists(st.text(string.ascii_letters[:3], min_size=1, max_size=4), min_size=1, max_size=6))
def test_the_longest_that_all_agree_with(names):
    def agrees(name):
        return all(other.startswith(name) or name.startswith(other) for other in names)

    index = agreed(names)
    longest = max((len(name) for name in names if agrees(name)), default=None)
    assert (None if index is None else len(names[index])) == longest
    assert index is None or agrees(names[index])
