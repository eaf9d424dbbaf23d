"""`sipipe generate` and `sipipe serve` as a user starts them, on a tiny model in two stages."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sipipe.tools.make_model.checkpoint import make_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = ["The capital of France is", "Once upon a time there was", "2 + 2 ="]
ENGINE = ["--pp", "2", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]


def command(name, model, *more):
    return [sys.executable, "-m", "sipipe", name, str(model), *more, *ENGINE]


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
    """No process, no shared memory after a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    ours = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    assert not ours
    left = {name for name in set(os.listdir("/dev/shm")) - before if "sipipe" in name}
    assert not left


def test_generate_gives_what_transformers_gives(model, environment):
    transformers = pytest.importorskip("transformers")
    done = subprocess.run(
        command("generate", model, "--json", "--max-tokens", "12", "--ignore-eos", "--file", "-"),
        input="\n".join(PROMPTS),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
    done = subprocess.run(
        command("generate", model, *PROMPTS, "--max-tokens", "5", "--temperature", "0.8"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "core plan: stage 0: core" in done.stderr
    places = [done.stdout.index(prompt) for prompt in PROMPTS]
    assert places == sorted(places)


def test_serve_streams_and_leaves_nothing_after_ctrl_c(model, environment, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command("serve", model, "--enforce-eager", "--port", str(port), "--samplers", "2"),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(server, port, log)
        text = log.read_text()
        assert "core plan: stage 0: core" in text
        assert "2 samplers" in text
        plain = complete(port, model, stream=False)
        streamed = complete(port, model, stream=True)
        assert plain == streamed
        processes = psutil.Process(server.pid).children(recursive=True)
        assert len(processes) >= 5  # engine, two workers, two samplers
        os.killpg(server.pid, signal.SIGINT)
        server.wait(60)
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_ready(server, port, log: Path):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with connect(port, 5) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(f"not ready: {log.read_text()[-3000:]}")


def complete(port, model, *, stream):
    body = {
        "model": str(model),
        "prompt": PROMPTS[0],
        "max_tokens": 16,
        "temperature": 0.8,
        "seed": 7,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"Content-Type": "application/json"}
    with connect(port, 120) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200
        if not stream:
            return json.load(response)["choices"][0]["text"]
        pieces = []
        for line in response:
            event = line.decode().removeprefix("data: ").strip()
            if event and event != "[DONE]":
                pieces.append(json.loads(event)["choices"][0]["text"])
    assert len(pieces) > 4
    return "".join(pieces)


def connect(port, timeout):
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout))
