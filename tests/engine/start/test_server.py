"""The OpenAI server under load: many streams, some given up, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
from tests.engine import servers
from tests.engine.engines import (
    assert_stock,
    in_shared_memory,
    in_shared_memory_of,
    model,
    prompts,
    tokens,
)
from tests.engine.servers import Server, complete, health, load, metric, post, wait_until

import sipipe

EXECUTOR = ("--distributed-executor-backend", "sipipe.Executor")
pytestmark = [pytest.mark.engine, pytest.mark.ci]


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    """A server in bfloat16: its address, process, log and directory for temporary files."""
    temporary = tempfile.mkdtemp(prefix="t")  # short: a socket's path has 107 characters
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--enforce-eager", "--max-model-len", "256", "--dtype", "bfloat16")
    # Every process says what it imports: see check_reach.
    more = {"PYTHONPROFILEIMPORTTIME": "1"}
    with Server(model(models), log, *options, temporary=temporary, more=more) as server:
        yield server.address, server.process, log, temporary
    shutil.rmtree(temporary)


@pytest.mark.ci
def test_served_logprobs_of_a_bfloat16_model_equal_stock(models, served):
    """One request at a time: in batches bfloat16 rounds by their shape, also in stock."""
    asked = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 5}
    batches = [{"prompts": [p], "params": [asked]} for p in prompts(4, longest=40, seed=8)]
    said = [complete(served[0], batch["prompts"][0], asked) for batch in batches]
    assert_stock(said, model(models), batches, same_in_bfloat16, dtype="bfloat16")


def same_in_bfloat16(found, stock):
    for (chosen, named), theirs in zip(found, stock, strict=True):
        assert [chosen] == tokens(theirs)
        for ours, at in zip(named, theirs[0]["outputs"][0]["logprobs"], strict=True):
            # Tied logits are frequent in bfloat16, and which of them are named is anybody's.
            assert ours == pytest.approx(sorted(value for value, _ in at.values()), abs=1e-3)


def forks(server):
    """What goes on from a process of a server, by its title: the kernel's record of how a process
    began is that of the one that it goes on from."""
    record = Path(f"/proc/{server.pid}/auxv").read_bytes()
    everybody = [server, *server.children(recursive=True)]
    return {
        " ".join(process.cmdline()): process
        for process in everybody
        if Path(f"/proc/{process.pid}/auxv").read_bytes() == record
    }


def test_the_engine_and_its_workers_are_forked_and_keep_nothing_of_the_server(served):
    """vLLM is imported once."""
    (server,) = psutil.Process(served[1].pid).children()
    forked = forks(server)
    kinds = [next(k for k in ("Engine", "PP0", "PP1", "server") if k in name) for name in forked]
    assert sorted(kinds) == ["Engine", "PP0", "PP1", "server"]
    port = int(served[0].rpartition(":")[2])
    listening = [
        p for p in forked.values() if port in [c.laddr.port for c in p.net_connections("inet")]
    ]
    assert listening == [server]


SAID_AT_A_START = (
    "core plan: ",
    "scheduler: core",
    "shared memory: ",
    "Output projection ",
    "non-default args: ",
    "Initializing a V1 LLM engine (v",  # vLLM's version, and all of its configuration
    "KV cache size: ",
    "microbatches in flight",
)
OF_THIS_SETUP = ("import time: ", "Failed to import Triton kernels")
"""What only a test's environment says: vLLM 0.33 here is the Python of a build for GPUs (test_newer_vllm.py)."""
NOT_SAID = ("custom scheduler", "Triton not available", "Triton is not installed", "Route: ")


def test_the_log_of_a_start_is_short_and_has_what_matters(served):
    lines = served[2].read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not any(said in line for said in OF_THIS_SETUP))
    start, served_at, _ = text.partition(f"{servers.MODEL} is served at {served[0]}/v1")
    assert served_at, text[-2000:]
    assert text.count(served_at) == 1
    for line in SAID_AT_A_START:
        assert start.count(line) == 1, line
    assert start.count("Model loading took") == 2, "of both stages"
    for line in NOT_SAID:
        assert line not in start
    assert len(start.splitlines()) <= 40, start


def test_vllms_own_server_forks_them_too_and_killed_it_leaves_nothing(models, tmp_path):
    options = ("--enforce-eager", "--max-model-len", "256", "--dtype", "float32", *EXECUTOR)
    with Server(model(models), tmp_path / "log", *options, module=servers.VLLM) as server:
        front = psutil.Process(server.process.pid)
        named = forks(front)
        assert [any(who in name for name in named) for who in ("Engine", "PP0", "PP1")] == [
            True
        ] * 3
        everybody, names = front.children(recursive=True), in_shared_memory_of(server.everybody())
        asked = {"temperature": 0.0, "max_tokens": 4, "logprobs": 0}
        assert len(complete(server.address, [5, 6, 7], asked)[0]) == 4
        text = server.log.read_text()
        assert "Route: /health" in text, "vLLM's own lines stay"
        assert not [
            line for line in ("custom scheduler", "Triton is not installed") if line in text
        ]
        front.kill()
        _, alive = psutil.wait_procs(everybody, timeout=15)
        assert not [p for p in alive if p.is_running()], server.log.read_text()[-3000:]
        wait_until(lambda: not names & in_shared_memory(), 5)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_fails_tells_its_client_why(served, streamed):
    """Its only token is ruled out until there are two; vLLM would say "Internal server error"."""
    stops = {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2, "stream": streamed}
    body = {"prompt": [5, 6], "max_tokens": 4, **stops}
    if streamed:
        with post(served[0], body) as answer:
            said = answer.read().split(b"data: ")[1]
    else:
        with pytest.raises(urllib.error.HTTPError) as failed:
            post(served[0], body)
        assert failed.value.code == 500
        said = failed.value.read()
    message = json.loads(said)["error"]["message"]
    assert message == "no token is left to sample: every logit is -inf or masked"


@pytest.mark.ci
def test_many_streams_with_aborts_end_and_nothing_is_left(served):
    address, process, log, temporary = served
    everybody = psutil.Process(process.pid).children(recursive=True)
    ends = asyncio.run(load(address))
    assert len(ends) == servers.STREAMS
    assert set(ends) <= {"done", "given up"}
    assert ends.count("done") >= servers.STREAMS * 2 // 3 - 1
    wait_until(lambda: metric(address, "vllm:num_requests_running") == 0, 20)
    assert metric(address, "vllm:num_requests_waiting") == 0
    assert metric(address, "vllm:kv_cache_usage_perc") == 0
    assert metric(address, "sipipe_microbatches_in_flight") == 0
    assert metric(address, "sipipe_requests_running") == 0
    idle = metric(address, "sipipe_idle_seconds_total")
    assert 0 < idle < metric(address, "sipipe_idle_seconds_total")
    assert metric(address, "sipipe_info") == 1
    mapped = in_shared_memory_of(everybody)  # perhaps none
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does, to the whole group
    process.wait(30)
    _, alive = psutil.wait_procs(everybody, timeout=15)
    assert not [p for p in alive if p.is_running()], log.read_text()[-3000:]
    wait_until(lambda: not mapped & in_shared_memory(), 5)
    # A compiled model's cache is torch's to keep.
    assert not [name for name in os.listdir(temporary) if not name.startswith("torch")]
    for alarm in ("leaked", "Traceback", "EngineDeadError"):
        assert alarm not in log.read_text(), alarm
    check_reach(log.read_text())


ASKED = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}


@contextlib.contextmanager
def clients(models, tmp_path, *options):
    """A server, and what submits four long requests to it at once."""
    given = prompts(4, longest=20, seed=3)
    options += ("--enforce-eager", "--max-model-len", "256", "--dtype", "float32")
    with Server(model(models), tmp_path / "log", *options) as server, ThreadPoolExecutor(4) as pool:
        yield server, lambda: [pool.submit(complete, server.address, p, ASKED) for p in given]


def chosen(answers):
    return [answer.result()[0] for answer in answers]


@pytest.mark.slow
def test_a_stall_is_seen_and_harms_nobody_and_a_server_drains(models, tmp_path):
    with clients(models, tmp_path, "--shutdown-timeout", "60") as (server, submit):
        address, process = server.address, server.process
        expected = chosen(submit())
        stopped = server.find("Worker_PP1")
        stopped.suspend()
        answers, began = submit(), time.monotonic()
        wait_until(lambda: health(address) == 503)
        print(f"/health is 503 {time.monotonic() - began:.1f} s after a worker was stopped")
        assert metric(address, "sipipe_stalled") == 1
        stopped.resume()
        assert chosen(answers) == expected
        wait_until(lambda: health(address) == 200)
        assert metric(address, "sipipe_stalled") == 0

        with post(address, {"prompt": [5, 6], "stream": True, **ASKED}) as answer:
            pieces = [answer.readline()]
            stopped.suspend()  # so the stream goes on when we have looked
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: health(address) == 503)
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                complete(address, [5], ASKED)
            refused.value.close()
            stopped.resume()
            pieces += answer.read().splitlines()
        drained = time.monotonic()
        pieces = [piece[6:].strip() for piece in pieces if piece.startswith(b"data: ")]
        assert pieces.pop() == b"[DONE]"
        found = [json.loads(piece)["choices"][0]["logprobs"]["tokens"] for piece in pieces]
        assert sum(map(len, found)) == 200
        assert process.wait(60) == 0
        print(f"it ended {time.monotonic() - drained:.1f} s after its last token")


@pytest.mark.slow
def test_a_death_is_seen_and_the_server_comes_back(models, tmp_path):
    with clients(models, tmp_path, "--restart") as (server, submit):
        address = server.address
        expected = chosen(submit())
        answers, began = submit(), time.monotonic()
        server.find("Worker_PP1").kill()
        wait_until(lambda: health(address) != 200)
        print(f"/health is not 200 {time.monotonic() - began:.2f} s after a worker was killed")
        for answer in answers:
            error = answer.exception()
            if error is None:  # it was done before
                assert answer.result()[0] in expected
            elif isinstance(error, urllib.error.HTTPError):
                with error:
                    assert error.code >= 500
            else:  # refused, or cut off
                assert isinstance(error, OSError | HTTPException), error
        wait_until(lambda: health(address) == 200)
        print(f"and 200 again after {time.monotonic() - began:.1f} s")
        assert chosen(submit()) == expected
        assert re.search(
            r"stage worker stage1\.0 \(pid \d+\) died, exit code -9.*\n"
            r"sipipe: the server ended by itself .* it is started again in 1 s",
            (tmp_path / "log").read_text(),
        )


ON_DEMAND = (
    "sipipe.tools",
    "sipipe.cli",
    "sipipe.kv_files",
    "sipipe.engine.self_test",
    "sipipe.worker.hooks.head",
    "sipipe.worker.hooks.drafting_batch",
)
"""Commands; a connector that is named; what families run that are not verified; draft heads."""


def check_reach(log):
    """An engine that serves imports nearly all of the code: what no user reaches is not kept."""
    imported = set(re.findall(r"^import time:.*\| +(sipipe[.\w]*)$", log, re.MULTILINE))
    imported.add("sipipe.engine.start.server")  # a process's main module is no import
    source = Path(sipipe.__file__).parent
    lines, missed = 0, {}
    for file in source.rglob("*.py"):
        name = ".".join(("sipipe", *file.relative_to(source).with_suffix("").parts))
        name = name.removesuffix(".__init__").removesuffix(".__main__")
        if name.startswith(ON_DEMAND):
            continue
        count = len(file.read_text().splitlines())
        lines += count
        if name not in imported:
            missed[name] = count
    assert sum(missed.values()) <= 0.05 * lines, missed
