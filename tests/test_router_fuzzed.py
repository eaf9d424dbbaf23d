"""deploy/prefill_router.py before raw requests that hypothesis makes, and its command's arguments."""

import asyncio
import contextlib
import json
import socket
import string
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.ipc.link.conftest import free_port

pytest.importorskip("aiohttp")
from tests.test_router import Running

ROUTER = Path(__file__).parents[1] / "deploy" / "prefill_router.py"
ELSEWHERE = "10.0.0.1"
"""An address that only clients say: no engine may hear of it as a cache's."""
TRANSFERS = {"kv_transfer_params": {"remote_host": ELSEWHERE}}
FIELDS = ["prompt", "stream", "n", "max_tokens", "vllm_xargs", *TRANSFERS, "ec_transfer_params"]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4).map(
    lambda body: {"act": "", "stream": False, **body, **TRANSFERS, "vllm_xargs": TRANSFERS}
)
contents = bodies.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=40)
headers = st.lists(
    st.sampled_from(
        [
            b"Content-Type: application/json; charset=punycode",
            b"Content-Type: text/html; charset=no-such",
            b"Content-Encoding: gzip",
            b"Content-Encoding: \xff",
            b"Transfer-Encoding: chunked",
            b"Expect: 100-continue",
            b"Expect: else",
            b"Upgrade: websocket",
            b"Authorization: Bearer \xff\xfe",
            b"X-Request-Id: \xe2\x80\xa8",
            b"X-Request-Id: \x00",
            b"Content-Length: 3",
            b"Content-Length: -1",
        ]
    )
    | st.tuples(
        st.text(string.ascii_letters + "-", min_size=1, max_size=9), st.binary(max_size=9)
    ).map(lambda header: header[0].encode() + b": " + header[1]),
    max_size=3,
)


@st.composite
def requests(draw):
    """A request, and some bytes of it that are others."""
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "OPTIONS", "TRACE"]))
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/v1/../x", "*"]
    path = draw(st.sampled_from(paths))
    content = draw(contents)
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: a", b"Connection: close"]
    lines += draw(headers)
    if draw(st.integers(0, 4)):
        lines.append(b"Content-Length: %d" % len(content))
    sent = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + content)
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(sent)))
        sent[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(sent)


@pytest.fixture(scope="module")
def running():
    """A router that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    router = Running(["prefill a"], ["decode a"], client_timeout=0.5, keys=())
    loop.run_until_complete(router.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield router
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(router.__aexit__())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def said_to(port, sent):
    """All that the router says until it closes the connection, as it does for every one."""
    said = b""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    with client, contextlib.suppress(ConnectionError):
        client.sendall(sent)
        while piece := client.recv(65536):
            said += piece
    return said


@pytest.mark.ci
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(sent=requests())
@example(b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nX-Request-Id: \xff\r\n\r\n")
def test_every_request_has_an_answer_and_the_router_stays(running, sent):
    """None fails in the router itself, none makes an engine hear of a client's cache, none stays."""
    for engine in running.engines.values():
        engine.asked.clear()
    said = said_to(running.port, sent)
    assert said[:9] in (b"", b"HTTP/1.1 ", b"HTTP/1.0 "), said
    assert said[9:12] != b"500", said
    for engine in running.engines.values():
        assert ELSEWHERE not in json.dumps([body for body, _ in engine.asked])
    health = said_to(running.port, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert health.startswith(b"HTTP/1.1 200 ")


BOTH = ["--prefill", "http://a:1", "--decode", "https://[::1]:2/base"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--prefill, --decode"),
        ([*BOTH, "--prefill", "localhost:8000"], "--prefill: 'localhost:8000'"),
        ([*BOTH, "--decode", "ftp://a"], "--decode: 'ftp://a'"),
        ([*BOTH, "--decode", "http://"], "--decode: 'http://'"),
        ([*BOTH, "--decode", "http://a:99999"], "--decode: 'http://a:99999'"),
        ([*BOTH, "--decode", "http://[::1"], "--decode: 'http://[::1'"),
        ([*BOTH, "--decode", "http://a b"], "--decode: 'http://a b'"),
        ([*BOTH, "--decode", "http://u:p@a"], "--decode: 'http://u:p@a'"),
        ([*BOTH, "--decode", "http://a?x=1"], "--decode: 'http://a?x=1'"),
        ([*BOTH, "--port", "x"], "--port: 'x'"),
        ([*BOTH, "--port", "0"], "--port: '0'"),
        ([*BOTH, "--port", "65536"], "--port: '65536'"),
        ([*BOTH, "--port", "9" * 5000], "--port: '999"),
        ([*BOTH, "--timeout", "0"], "--timeout: '0'"),
        ([*BOTH, "--timeout", "nan"], "--timeout: 'nan'"),
        ([*BOTH, "--client-timeout", "inf"], "--client-timeout: 'inf'"),
        ([*BOTH, "--max-body", "-1"], "--max-body: '-1'"),
        ([*BOTH, "--api-key", ""], "--api-key: a key is empty"),
        ([*BOTH, "--tim", "5"], "--tim"),
        ([*BOTH, "--host", "no.such.invalid", "--port", str(free_port())], "no.such.invalid"),
    ],
)
def test_arguments_are_checked_each_in_one_line(words, named):
    command = [sys.executable, str(ROUTER), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode in (1, 2)
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("prefill_router: ")
    assert named in line


def test_a_port_that_is_taken_is_said_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, str(ROUTER), *BOTH, "--port", port]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"prefill_router: cannot listen on 127.0.0.1:{port}: ")


NO_HTTP = [
    b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
]


def test_what_is_no_http_is_a_line_of_the_log():
    port = free_port()
    command = [sys.executable, str(ROUTER), *BOTH, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as router:
        try:
            while b"Running" not in router.stdout.readline():
                assert router.poll() is None
            answers = [said_to(port, sent) for sent in (*NO_HTTP, *NO_HTTP)]
        finally:
            router.terminate()
        log = router.communicate(timeout=60)[1].decode()
    assert {answer[9:12] for answer in answers} == {b"400"}, answers
    assert "Traceback" not in log
    assert len(log.splitlines()) <= len(answers), log
