"""`sipipe generate` and `sipipe serve` as a user starts them, on a tiny model in two stages."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from benchmarks.make_model.checkpoint import make_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = ["The capital of France is", "Once upon a time there was", "2 + 2 ="]
ENGINE = ["--pp", "2", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]


def generated(model, *more, prompts=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sipipe", "generate", str(model), *more, *ENGINE]
    done = subprocess.run(
        command, input=prompts, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def environment(monkeypatch):
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process after a test."""
    others = set(psutil.Process().children(recursive=True))  # of tests before, in this process
    yield
    ours = set(psutil.Process().children(recursive=True)) - others
    assert not [child for child in ours if child.is_running()]


def test_generate_gives_what_transformers_gives(model, environment):
    transformers = pytest.importorskip("transformers")
    options = "--json --max-tokens 12 --ignore-eos --file -"
    done = generated(model, *options.split(), prompts="\n".join(PROMPTS))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model)
    for line in lines:
        ids = tokenizer(line["prompt"], return_tensors="pt").input_ids
        expected = oracle.generate(
            ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert line["token_ids"] == expected[0, ids.shape[1] :].tolist()
        assert line["finish_reason"] == "length"
        assert line["text"] == tokenizer.decode(line["token_ids"], skip_special_tokens=True)


def test_generate_streams_to_the_terminal_in_order(model, environment):
    done = generated(model, *PROMPTS, "--max-tokens", "5", "--temperature", "0.8")
    assert "core plan: stage 0: core" in done.stderr
    places = [done.stdout.index(prompt) for prompt in PROMPTS]
    assert places == sorted(places)


def test_ctrl_c_amid_a_prompt_ends_all_and_is_no_failure(model, environment):
    """A terminal interrupts the engine's processes too, whose end is then no news."""
    options = [PROMPTS[0], "--max-tokens", "480", "--ignore-eos", *ENGINE]
    process = subprocess.Popen(
        [sys.executable, "-m", "sipipe", "generate", str(model), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        begun = os.read(process.stdout.fileno(), 100)  # the prompt; its text follows
        assert begun, process.stderr.read()[-3000:]
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 130, log[-3000:]
    last = log.split(b"core plan")[-1]
    assert b"Traceback" not in last, last
    assert b"generate:" not in last, last
    deadline = time.monotonic() + 20
    while left := [it for it in psutil.process_iter() if in_session(it, process.pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def in_session(process, session) -> bool:
    with contextlib.suppress(OSError, psutil.Error):
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False
