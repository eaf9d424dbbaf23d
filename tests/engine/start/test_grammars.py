"""Grammars of a server's clients: what is wrong with one is said, and none is in another's way."""

import json
import random
import re
import signal
import socket
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import psutil
import pytest
from tests.engine.engines import model
from tests.engine.servers import MODEL, Server, metric, post, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.ci]

SECONDS = 3
"""What a grammar may take here."""
ITSELF = {"json": {"$ref": "#"}}
DEAD_END = {"regex": r"a[^\s\S]"}
TWICE = {"grammar": 'root ::= "a"\nroot ::= "b"'}


def long_choice():
    """Alternatives that are alike for so long that they compile for minutes; others each time."""
    text = "".join(random.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(30_000))
    return {"choice": [text, text + "x"]}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("grammars") / "log"
    settings = json.dumps({"sipipe": {"grammar_timeout": SECONDS}})
    options = ("--enforce-eager", "--max-model-len", "256", "--additional-config", settings)
    drafts = ("--speculative-config", '{"method": "ngram"}', "--shutdown-timeout", "1")
    with Server(model(models), log, *options, *drafts) as server:
        # The first grammar decides the engine's backend: with xgrammar, guidance's do not compile.
        assert text(server, {"choice": ["first"]}) == "first"
        yield server


def body(grammar, **more):
    return {
        "prompt": [5, 6],
        "max_tokens": 40,
        "temperature": 0.0,
        "structured_outputs": grammar,
        **more,
    }


def refusal(server, grammar):
    """The status and the message that answer a request with ``grammar``."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server.address, body(grammar))
    with refused.value as error:
        return error.code, json.loads(error.read())["error"]["message"]


def text(server, grammar):
    with post(server.address, body(grammar)) as answer:
        return json.load(answer)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        # vLLM 0.33 refuses it earlier, as xgrammar does not take it and guidance would.
        (TWICE, "Invalid structured outputs: .*root|only supports one backend per engine"),
        (ITSELF, "Invalid structured outputs: the grammar allows no token at all: it refers only"),
        (DEAD_END, "Invalid structured outputs: the grammar allows no token behind those"),
    ],
)
def test_a_grammar_that_cannot_be_used_tells_its_client_why(server, grammar, why):
    status, message = refusal(server, grammar)
    assert status == 400, message
    assert re.search(why, message)
    assert "\n" not in message


def test_also_in_a_stream(server):
    with post(server.address, body(ITSELF, stream=True)) as answer:
        said = answer.read().split(b"data: ")[1]
    error = json.loads(said)["error"]
    assert error["code"] == 400
    assert "allows no token at all" in error["message"]


def test_alternatives_that_share_a_characters_bytes_are_served_with_drafts(server):
    assert text(server, {"choice": ["北京市", "上海市"]}) in ("北京市", "上海市")
    assert text(server, {"regex": "Grüße 🌶 aus Köln"}) == "Grüße 🌶 aus Köln"


def test_one_that_takes_too_long_fails_alone(server):
    with ThreadPoolExecutor(1) as clients:
        late = clients.submit(refusal, server, long_choice())
        assert text(server, {"choice": ["yes"]}) == "yes", "meanwhile"
        status, message = late.result()
    assert status == 400
    assert f"did not compile within {SECONDS} s" in message
    assert '"grammar_timeout"' in message


def leave(server, grammar):
    """Ask, and hang up once the engine has the request."""
    waiting = metric(server.address, "vllm:num_requests_waiting")
    data = json.dumps({"model": MODEL, **body(grammar)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + data)
        wait_until(lambda: metric(server.address, "sipipe_requests_running") >= 0, 1)
        wait_until(lambda: metric(server.address, "vllm:num_requests_waiting") > waiting, 20)


def test_one_whose_client_has_left_holds_up_no_other(server):
    leave(server, long_choice())
    assert text(server, {"choice": ["soon"]}) == "soon"


def test_the_end_waits_for_none(server):
    """Last: it ends the server."""
    everybody = server.everybody()
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(post, server.address, body(long_choice()))
        wait_until(lambda: metric(server.address, "vllm:num_requests_waiting") > 0, 20)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        error = answer.exception()
        assert isinstance(error, OSError | HTTPException), error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
    _, alive = psutil.wait_procs(everybody, timeout=15)
    assert not [process for process in alive if process.is_running()]
    log = server.log.read_text()
    assert "Fatal Python error" not in log, log[-3000:]
