"""The self-test beside an engine: when it compares, what it says, what it keeps, and its bounds."""

import contextlib
import copy
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model

from sipipe.engine.self_test import kept, self_test
from sipipe.engine.self_test.difference import bound, difference
from sipipe.engine.self_test.families import VERIFIED, implementation_of, is_verified
from sipipe.engine.self_test.kept import Finding, Subject
from sipipe.engine.self_test.prompts import (
    LONGEST,
    TEXTS,
    TOKENS,
    Position,
    Reference,
    SilentError,
    make_prompts,
)
from sipipe.engine.self_test.self_test import SelfTest
from sipipe.engine.setup.decide import decide
from sipipe.engine.start import arguments, plugin
from sipipe.errors import UnsupportedError

SUBJECT = Subject(
    architecture="FooForCausalLM",
    implementation="auto",
    model_config="0" * 64,
    layers=(2, 2),
    ranks=1,
    dtype="float32",
    quantization="",
    kv_cache_dtype="auto",
    compiled=False,
    vllm="0.32.0",
    sipipe="0.1.0",
    torch="2.13",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own."""
    monkeypatch.delenv("SIPIPE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sipipe" / kept.FOLDER


# ---- what is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "finding",
    [Finding(subject=SUBJECT, difference=1e-5), Finding(subject=SUBJECT, why="too large")],
)
def test_a_finding_is_kept_for_what_was_tested(cache, finding):
    assert kept.load(SUBJECT) is None
    kept.keep(finding)
    assert kept.load(SUBJECT) == finding
    other = Subject(
        **{name: getattr(SUBJECT, name) for name in SUBJECT.__struct_fields__} | {"ranks": 2}
    )
    assert kept.load(other) is None
    assert [file.stat().st_mode & 0o777 for file in cache.iterdir()] == [0o600]


def test_no_damage_is_taken_for_a_finding(cache):
    finding = Finding(subject=SUBJECT, difference=1e-5)
    kept.keep(finding)
    [file] = cache.iterdir()
    whole = file.read_bytes()
    changed = [whole[:length] for length in range(len(whole))]
    changed += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    changed += [b"", b"null", b"[]", b"{}", b"\xff" * 100, whole * 200]
    for content in changed:
        file.write_bytes(content)
        found = kept.load(SUBJECT)
        # A digit of the difference alone may be another: it is only shown.
        assert found is None or found.subject == SUBJECT
        assert found is None or (found.difference is not None and not found.why)


def test_a_finding_of_somebody_else_is_none(cache):
    kept.keep(Finding(subject=SUBJECT, difference=1e-5))
    [file] = cache.iterdir()
    file.chmod(0o666)
    assert kept.load(SUBJECT) is None
    file.chmod(0o600)
    assert kept.load(SUBJECT) is not None
    elsewhere = cache.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert kept.load(SUBJECT) is None
    file.unlink()
    elsewhere.rename(file)
    cache.chmod(0o777)
    assert kept.load(SUBJECT) is None


# ---- how far apart answers are ------------------------------------------------------------------

VECTORS = st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8).filter(
    lambda values: np.std(values) > 0.1
)


def positions(values, tokens=(0, 0, 0)):
    scores = np.asarray(values, dtype=np.float32)
    return [Position(token=token, scores=scores) for token in tokens]


@given(VECTORS, st.floats(-50, 50, width=32))
def test_log_probabilities_and_logits_are_the_same_scores(values, shift):
    moved = np.asarray(values, dtype=np.float32) + np.float32(shift)
    assert difference([positions(values)], [positions(moved)]) < 1e-4


@given(VECTORS)
def test_scores_that_have_nothing_in_common_are_far_apart(values):
    turned = -np.asarray(values)
    assert difference([positions(turned)], [positions(values)]) == pytest.approx(2)
    assert difference([positions(np.zeros(8))], [positions(values)]) == pytest.approx(1)
    nothing = np.full(8, np.nan)
    assert difference([positions(nothing)], [positions(values)]) > bound("bfloat16")


def test_a_fault_of_the_cache_alone_is_seen_and_one_token_of_rounding_is_none():
    right = np.arange(8.0)
    wrong = right[::-1]
    good = [positions(right) for _ in range(4)]
    # Right behind the prompt, wrong behind each later token.
    later = [[Position(token=0, scores=right), *positions(wrong, tokens=(0, 0))] for _ in range(4)]
    assert difference(later, good) > 1
    flipped = [positions(wrong), *(positions(right) for _ in range(3))]
    assert difference(flipped, good) < 1e-6
    # Behind another token other scores are right.
    parted = [[*positions(right, tokens=(1,)), *positions(wrong, tokens=(0, 0))] for _ in range(4)]
    assert difference(parted, good) < 1e-6


# ---- when it compares ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model("llama", path)
    return path


def engine_config(path, *options, **settings):
    """vLLM's configuration of an engine of the model at ``path``, with SiPipe's ``settings``."""
    words = [str(path), "--max-model-len", "256", "--enforce-eager", *options]
    args = arguments.parse_engine_args(words, {"samplers": 1, **settings})
    return plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args))


@pytest.fixture
def make(path, cache, monkeypatch):
    """The self-test of an engine with ``settings``, whose process with all layers is ``program``."""

    def made(program=None, *, options=(), stages=2, **settings):
        config = engine_config(path, "-pp", str(stages), *options, **settings)
        setup = decide(config)
        if program is not None:
            monkeypatch.setattr(
                self_test, "PROGRAM", ("-m", "tests.engine.self_test.mute", program)
            )
        else:
            monkeypatch.setattr(self_test, "start_child", None)  # to call it is an error
        return SelfTest(setup)

    return made


@pytest.fixture
def log(caplog):
    """What the self-test has logged."""
    caplog.set_level(logging.INFO, logger=self_test.logger.name)
    return lambda: "\n".join(it.getMessage() for it in caplog.records if "self_test" in it.name)


@pytest.mark.parametrize(
    "asked", [{}, {"self_test": "off"}, {"self_test": "always", "stages": 1}], ids=str
)
def test_most_starts_have_none(make, log, asked):
    test = make(**asked)
    test.begin()
    test.compare(None, ())
    assert log() == ""


def test_too_little_memory_is_said(make, log, monkeypatch):
    monkeypatch.setattr(self_test, "free_bytes", lambda: 1 << 30)
    test = make(self_test="always")
    test.begin()
    test.compare(None, ())
    assert "all layers in one stage take about 2.5 GiB, and 1.0 GiB are free" in log()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--skip-tokenizer-init"], "there is no tokenizer"),
        (["--load-format", "dummy"], "loaded by --load-format dummy"),
        (["--max-model-len", "3"], "requests have 3 tokens at most"),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
            ],
            "a KV connector would take its prompts for requests",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(make, log, options, why):
    test = make(self_test="always", options=options)
    test.begin()
    assert why in log()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("dies", "the process with all layers has ended"),
        ("refuses", "one stage cannot answer: ValueError: no such layer"),
        ("hangs", "one stage with all layers took more than 1 s"),
        ("stops", "the process with all layers has stopped"),
        ("babbles", "UnpicklingError"),
    ],
)
def test_whatever_the_other_process_does_the_engine_goes_on(make, log, monkeypatch, program, why):
    monkeypatch.setattr(self_test, "PIPE_SECONDS", 2)
    test = make(program, self_test="always", start_timeout=4 if program == "hangs" else 400)
    test.begin()
    test.compare(None, ())
    assert why in log()
    assert "have not been compared" in log()


@given(st.integers(TOKENS + 1, 40), st.integers(0, 40))
def test_prompts_and_answers_fit_in_the_longest_request(longest, tokens):
    """A stage has room for no more, and a longer request would end it."""
    tokenizer = SimpleNamespace(encode=lambda text: [5] * (tokens if text is TEXTS[0] else 1))
    for prompt in make_prompts(tokenizer, longest):
        assert 1 <= len(prompt) <= min(LONGEST, longest - TOKENS)


def test_a_tokenizer_of_no_tokens_is_said():
    with pytest.raises(SilentError, match="makes no tokens"):
        make_prompts(SimpleNamespace(encode=lambda _: []), 100)


def test_what_took_time_is_not_tried_again_unless_asked(make, log, monkeypatch):
    make("refuses", self_test="always").begin()
    monkeypatch.setattr(self_test, "is_verified", lambda model: False)
    make().begin()
    assert "no such layer (found at an earlier start" in log()


# ---- what it finds ------------------------------------------------------------------------------


def scores(shift):
    random = np.random.default_rng(0)
    return [
        [
            Position(token=1, scores=random.normal(0, 1, 50) + shift * random.normal(0, 1, 50))
            for _ in range(3)
        ]
        for _ in range(4)
    ]


def computed(monkeypatch, count):
    """The process with all layers has answered so many prompts."""
    monkeypatch.setattr(self_test, "free_bytes", lambda: 64 << 30)
    reference = Reference(prompts=[[1]] * count, answers=scores(0.0))
    monkeypatch.setattr(SelfTest, "_compute", lambda _: reference)


@pytest.mark.parametrize(("shift", "right"), [(0.0, True), (1e-4, True), (0.1, False)])
def test_a_difference_that_rounding_does_not_explain_ends_the_start(
    make, log, monkeypatch, shift, right
):
    test = make(self_test="always", options=["--dtype", "float32"])
    computed(monkeypatch, count=4)
    test.begin()
    monkeypatch.setattr(SelfTest, "_of_stages", lambda *_: scores(shift))
    with (
        contextlib.nullcontext()
        if right
        else pytest.raises(
            UnsupportedError,
            match=r"LlamaForCausalLM: with 2 stages its answers are not .* --pipeline-parallel-size 1",
        )
    ):
        test.compare(None, ())
    assert ("2 stages answer as one stage does" in log()) == right


def test_an_error_of_the_self_tests_own_ends_no_engine(make, log, monkeypatch):
    test = make(self_test="always")
    computed(monkeypatch, count=1)
    test.begin()
    test.compare(None, ())  # there are no KV caches
    assert "have not been compared" in log()


# ---- who is verified ----------------------------------------------------------------------------


def test_the_list_is_that_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()
    section = page.partition("### Verified families")[2].partition("\n### ")[0]
    rows = [
        line.split(" | ") for line in section.splitlines() if line.startswith("| ") and "`" in line
    ]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(set(listed)) == len(listed)
    assert set(listed) == VERIFIED


def test_a_finding_is_of_one_implementation(path):
    """Of one architecture vLLM has a class of its own, transformers' and plugins'."""
    model = copy.copy(engine_config(path).model_config)
    implementation = implementation_of(model)
    model.model_impl = "transformers"
    assert implementation_of(model) != implementation


def test_another_implementation_of_a_verified_family_is_not(path, monkeypatch):
    model = engine_config(path).model_config
    assert is_verified(model)
    monkeypatch.setitem(model.registry.models, "LlamaForCausalLM", None)
    assert not is_verified(model)
