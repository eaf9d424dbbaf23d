"""A server that is told to end while it is paused: its clients get their answers, or are told why not."""

import json
import re
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.engine.engines import model
from tests.engine.servers import VLLM, Server, complete, post, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.ci]

TOKENS = 200
ASKED = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
DOORS = {"sipipe": (), VLLM: ("--distributed-executor-backend", "sipipe.Executor")}
OPTIONS = ("--enforce-eager", "--max-model-len", "256", "--shutdown-timeout")


@contextmanager
def server(models, tmp_path, door, seconds):
    """A server whose operator may pause it, with ``seconds`` for requests in flight at its end."""
    options = (*OPTIONS, str(seconds), "--enable-server-load-tracking", *DOORS[door])
    more = {"VLLM_SERVER_DEV_MODE": "1"}
    with Server(model(models), tmp_path / "log", *options, module=door, more=more) as started:
        yield started


def pause(server, mode):
    asked = urllib.request.Request(f"{server.address}/pause?mode={mode}", method="POST")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.loads(answer.read()) == {"status": "paused"}


def answered(server, prompt):
    """The tokens of a whole answer; or what the client is told, as the server's message."""
    try:
        return len(complete(server.address, prompt, ASKED)[0])
    except urllib.error.HTTPError as refused:
        with refused:
            return json.loads(refused.read())["error"]["message"]


def streamed(server, opened):
    """The same, of a stream; ``opened`` is called at its first piece."""
    tokens = 0
    with post(server.address, {"prompt": [5, 6], "stream": True, **ASKED}) as answer:
        for line in answer:
            piece = line.removeprefix(b"data: ").strip()
            if piece == b"[DONE]":
                return tokens
            if not piece:
                continue
            said = json.loads(piece)
            if "error" in said:
                return said["error"]["message"]
            tokens += len(said["choices"][0]["logprobs"]["tokens"])
            opened()
    return tokens


@pytest.mark.parametrize("door", DOORS)
def test_requests_that_a_pause_keeps_end_before_the_server_does(models, tmp_path, door):
    with server(models, tmp_path, door, 30) as started, ThreadPoolExecutor(6) as pool:
        begun = []
        streams = [pool.submit(streamed, started, lambda: begun.append(1)) for _ in range(3)]
        others = [pool.submit(answered, started, [7, 8, k]) for k in range(3)]
        wait_until(lambda: len(begun) >= 3)
        pause(started, "keep")
        started.process.send_signal(signal.SIGTERM)
        assert [each.result(90) for each in (*streams, *others)] == [TOKENS] * 6
        assert started.process.wait(60) == 0


@pytest.mark.parametrize(("door", "seconds"), [("sipipe", 30), (VLLM, 30), (VLLM, 0)])
def test_requests_that_came_in_a_pause_are_answered_or_told_why_not(
    models, tmp_path, door, seconds
):
    """With time for them they run now; who is still on the way to the engine is refused."""
    with server(models, tmp_path, door, seconds) as started, ThreadPoolExecutor(6) as pool:
        pause(started, "abort")
        waiting = [pool.submit(answered, started, [7, 8, k]) for k in range(6)]
        wait_until(lambda: all(w.done() for w in waiting) or load_of(started) == 6)
        started.process.send_signal(signal.SIGTERM)
        for each in waiting:
            said = each.result(90)
            told = isinstance(said, str) and re.search("has ended|is ending|is paused", said)
            assert told or (seconds and said == TOKENS), said
        assert started.process.wait(60) == 0


def load_of(server):
    """Requests that the API server has accepted and not answered."""
    with urllib.request.urlopen(f"{server.address}/load", timeout=60) as answer:
        return json.loads(answer.read())["server_load"]
