"""What `sipipe bench` asks of a server, against one that only knows the protocol."""

import json
import random
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import ClassVar

import pytest

pytest.importorskip("vllm")

from benchmarks.make_model.checkpoint import make_model

from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools import load

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0
"""


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict]] = []
    keys: ClassVar[set[str | None]] = set()
    refuses: ClassVar[dict[str, int]] = {}
    """Statuses by what a request's body has, or by its path."""
    bias = 0.0
    """What is added to the first token's logit in draws, but not in what is told."""
    tied = 0
    """So many tokens behind the k-th are as likely, and drawn as well."""
    behind = 0
    """So many tokens behind the k-th are drawn although they are less likely."""

    def log_message(self, *_):
        pass

    def _note_key(self):
        if self.path.startswith("/v1/"):  # vLLM's client asks for metrics without a key
            self.keys.add(self.headers["Authorization"])

    def do_GET(self):
        self._note_key()
        if self.path in self.refuses:
            return self.send_error(self.refuses[self.path])
        return self._answer({"data": [{"id": "name"}]} if self.path == "/v1/models" else METRICS)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self._note_key()
        if status := next((self.refuses[k] for k in body if body[k] and k in self.refuses), None):
            return self.send_error(status)
        if body.get("stream"):
            tokens = body["max_tokens"]
            usage = {"completion_tokens": tokens, "prompt_tokens": 3}
            events = [{"choices": [{"text": "a"}]}] * tokens + [{"choices": [], "usage": usage}]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return self._answer(text + "data: [DONE]\n\n")
        logits = [-0.1 * i for i in range(load.SHOWN)]
        last = body.get("top_k", 1) - 1
        logits[last : last + self.tied + 1] = [logits[last]] * (self.tied + 1)
        drawn = [logits[0] + self.bias, *logits[1:]]
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            choice = {"index": index, "text": "a", "token_ids": prompt[:2]}
            if "logprobs" in body:
                weights = [2.718281828**logit for logit in drawn]
                among = last + 1 + self.tied + self.behind
                (token,) = random.choices(range(among), weights[:among])
                told = {f"token_id:{i}": logit for i, logit in enumerate(logits)}
                choice["logprobs"] = {"tokens": [f"token_id:{token}"], "top_logprobs": [told]}
            choices.append(choice)
        return self._answer({"choices": choices[::-1]})

    def _answer(self, what):
        text = (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "keys", set())
    monkeypatch.setattr(Server, "refuses", {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model("llama", tmp_path_factory.mktemp("model") / "model"))


def job(url, model, **more):
    line = "--dataset-name random --random-input-len 8 --random-output-len 5 --ignore-eos"
    usual = {"command": [], "env": {}, "url": url, "model": model, "load": line.split()}
    usual |= {"mixes": {"greedy": {"temperature": 0}, "hot": {"temperature": 2.0}}}
    loads = [("greedy", 3, 0, 0), ("hot", 3, 0, 99.0), ("greedy", 2, 12, 0), ("hot", 2, 12, 99)]
    return load.Job(**usual | {"loads": loads, "repeat": 2, "draws": 512} | more)


def test_a_server_is_measured_by_vllms_client(url, model, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    found = load.run(job(url, model))
    assert Server.keys == {"Bearer secret"}, "ours and vLLM's client send the same"
    names = ["greedy 3", "hot 3 rate=99.0", "greedy 2 prompt=12", "hot 2 prompt=12 rate=99"]
    assert list(found["runs"]) == names
    for name, runs in found["runs"].items():
        assert [run["completed"] for run in runs] == [int(name.split()[1])] * 2
        assert all(run["output_throughput"] > 0 and "p99_tpot_ms" in run for run in runs)
        assert not [key for run in runs for key in run if "itl" in key or "e2el" in key]
        assert all(run["span"][1] - run["span"][0] >= run["duration"] for run in runs)
    assert found["kv_tokens"] == 1600
    (greedy,) = (body for body in Server.asked if "return_token_ids" in body)
    assert len(greedy["prompt"]) == 16
    assert found["answers"] == [prompt[:2] for prompt in greedy["prompt"]]
    assert found["draws"]["draws"] == 512
    streamed = [body for body in Server.asked if body.get("stream")]
    assert {body["temperature"] for body in streamed} == {0, 2.0}
    assert all(body["max_tokens"] == 5 and body["ignore_eos"] for body in streamed)
    json.dumps(found)


@pytest.mark.ci
def test_a_server_that_caches_has_seen_the_prompts_of_no_run_and_rows_get_the_same(url, model):
    for start in (0, 0, 1):
        load.run(job(url, model, draws=0, start=start))
    texts = iter(body["prompt"] for body in Server.asked if body.get("stream"))
    row, same, later = (
        [sorted(islice(texts, n)) for n in (3, 3, 2, *[3, 3, 2, 2] * 2)] for _ in "123"
    )
    assert row == same
    measured = [*row[3:], *later[3:]]
    assert len({tuple(prompts) for prompts in measured}) == len(measured)
    begun = [text[:2] for prompts in measured for text in prompts]  # few tokens: some are alike
    assert len(set(begun)) > len(begun) / 2


def test_several_rates_are_warmed_up_for_once(url, model):
    loads = [("greedy", 2, 0, rate) for rate in (50.0, 400.0, 200.0)]
    asked = job(url, model, loads=loads, mixes={"greedy": {}}, repeat=1, draws=0)
    assert len(load.run(asked)["runs"]) == 3
    assert len([body for body in Server.asked if body.get("stream")]) == 2 * (1 + 3)


def test_a_server_that_refuses_what_is_compared_keeps_what_was_measured(url, model, monkeypatch):
    monkeypatch.setattr(Server, "refuses", {"logprobs": 400})
    one = {"loads": [("greedy", 2, 0, 0)], "repeat": 1, "mixes": {"greedy": {"temperature": 0}}}
    asked = job(url, model, **one)
    asked.load.extend(["--goodput", "ttft:100000", "tpot:100000"])
    found = load.run(asked)
    (run,) = found["runs"]["greedy 2"]
    assert run["request_goodput"] == pytest.approx(2 / run["duration"])
    assert found["answers"]
    assert found["draws"] is None
    assert found["refused"] == "HTTPError: HTTP Error 400: Bad Request"
    monkeypatch.setattr(Server, "refuses", {"return_token_ids": 422})
    found = load.run(job(url, model, **one))
    assert found["answers"] is found["draws"] is None

    def of_another_kind(*_):
        raise TypeError("'NoneType' object is not subscriptable")

    monkeypatch.setattr(load, "draws", of_another_kind)
    monkeypatch.setattr(Server, "refuses", {})
    found = load.run(job(url, model, **one))
    assert found["runs"]
    assert found["refused"].startswith("TypeError: ")
    monkeypatch.setattr(Server, "refuses", {"/v1/models": 401})
    with pytest.raises(SiPipeError, match="401: Unauthorized: set OPENAI_API_KEY to its key"):
        load.run(job(url, model, **one))
    monkeypatch.setattr(Server, "refuses", {"/v1/models": 404})
    with pytest.raises(SiPipeError, match=f"^{url}/v1/models answers HTTP Error 404: Not Found$"):
        load.run(job(url, model, **one))


def test_draws_that_are_not_the_servers_own_are_told(url, monkeypatch):
    random.seed(0)
    assert load.draws(url, 2048)["p"] > 1e-4
    assert load.draws(url, 300)["draws"] == 300
    monkeypatch.setattr(Server, "bias", 1.0)
    assert load.draws(url, 2048)["p"] < 1e-6


def test_draws_of_tokens_as_likely_as_the_last_of_the_k_do_not_count(url, monkeypatch):
    random.seed(0)
    monkeypatch.setattr(Server, "tied", 2)
    found = load.draws(url, 2048)
    assert found["p"] > 1e-4
    assert 1000 < found["draws"] < 2048
    monkeypatch.setattr(Server, "bias", 1.0)
    assert load.draws(url, 2048)["p"] < 1e-6


def test_draws_behind_the_k_are_told(url, monkeypatch):
    monkeypatch.setattr(Server, "behind", 1)
    found = load.draws(url, 256)
    assert found["p"] == 0
    assert found["outside"] > 0


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("print('--x: no such option'); exit(2)", ConfigError, "--x: no such option"),
        ("exit(7)", SiPipeError, "the server ended with status 7"),
        ("print('sipipe: no m'); exit(1)", SiPipeError, "ended with status 1: sipipe: no m"),
        ("exit(2)", SiPipeError, "the server ended with status 2"),
    ],
)
def test_a_server_that_does_not_start_says_why(code, kind, words):
    command = [sys.executable, "-c", code]
    with pytest.raises(kind, match=words):
        load.run(job("", "m", command=command, mixes={}, loads=[]))


def test_no_proxy_stands_before_a_server_that_was_started(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "corp")
    monkeypatch.delenv("no_proxy")
    with pytest.raises(SiPipeError):
        load.run(job("", "m", command=[sys.executable, "-c", "exit(7)"], mixes={}, loads=[]))
    assert all(map(urllib.request.proxy_bypass, ("127.0.0.1", "localhost", "corp")))
    assert not urllib.request.proxy_bypass("elsewhere")


def test_a_process_without_a_command_line_has_its_memory_told():
    with subprocess.Popen([""], executable="/bin/cat", stdin=subprocess.PIPE) as process:
        assert list(load.memory_mib(process.pid)) == ["cat"]
        process.stdin.close()
    assert load.memory_mib(process.pid) == {}


def test_an_address_without_a_port_is_one_line():
    with pytest.raises(SiPipeError, match=r"^no server answers at http://host:abc$"):
        load.wait_until_served("http://host:abc", None, None)
