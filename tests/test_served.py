"""`benchmarks.served`, `benchmarks.side_by_side` and `benchmarks.peers` without engines."""

import argparse
import contextlib
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks import peers, served, side_by_side
from benchmarks.side_by_side import Load

from sipipe.errors import SiPipeError


def options(**given):
    usual = {"loads": "short,chat", "sampling": "greedy,chat", "requests": 64, "quick": False}
    return argparse.Namespace(**usual | {"no_rates": False} | given)


def test_both_loads_come_at_once_and_at_three_rates():
    loads = served.loads_of(options())
    assert len({load.name for load in loads}) == len(loads)
    for name in ("short", "chat"):
        mine = [load for load in loads if load.name.startswith(name)]
        assert {load.sampling for load in mine if not load.rate} == {"greedy", "chat"}
        assert len({load.rate for load in mine if load.rate}) == 3
        assert all(load.words == served.LENGTHS[name] for load in mine)
    few = served.loads_of(options(quick=True, loads="short"))
    assert [(load.sampling, load.requests) for load in few] == [
        ("greedy", 1),
        ("greedy", 64),
        ("chat", 64),
    ]
    assert {load.requests for load in served.loads_of(options(requests=4))} >= {1, 4}


def test_rounds_after_the_first_answer_what_most_requests_ask_at_once():
    again = [load for load in served.loads_of(options()) if served.in_all_rounds(load, 64)]
    assert [(load.name.split(",")[0], load.sampling, load.requests) for load in again] == [
        ("short", "greedy", 64),
        ("short", "chat", 64),
        ("chat", "greedy", 24),
        ("chat", "chat", 24),
    ]


def figures(speed):
    times = {f"{part}_{of}_ms": speed for part in ("p50", "p99") for of in ("ttft", "tpot")}
    return {"output_throughput": float(speed), "total_token_throughput": 2.0 * speed} | times


def test_ratios_are_of_answers_side_by_side():
    (load,) = served.loads_of(options(loads="short", requests=1, sampling="greedy", no_rates=True))
    rounds = [
        {load.name: {"sipipe": [figures(40)], "stock": [figures(20)], "stock-one": [figures(50)]}},
        {load.name: {"sipipe": [figures(90)], "stock": [figures(30)], "stock-one": [figures(60)]}},
    ]
    rows = served.table([load], ["sipipe", "stock", "stock-one"], rounds)
    ours = rows[0]
    assert ours["tok/s"] == {"median": 65.0, "low": 40.0, "high": 90.0, "n": 2}
    assert ours["of stock with the same stages"] == {"median": 2.5, "low": 2.0, "high": 3.0, "n": 2}
    assert ours["of stock's best"]["median"] == pytest.approx((40 / 50 + 90 / 60) / 2)
    assert ours["noise"] == 90 / 40
    assert rows[2]["of stock's best"] == {"median": 1.0, "low": 1.0, "high": 1.0, "n": 2}
    assert ours[served.OF_THE_SAME] is None
    eight = {load.name: {"sipipe": [figures(40)], "sipipe-int8": [figures(50)]}}
    rows = served.table([load], ["sipipe", "sipipe-int8"], [eight])
    assert rows[1][served.OF_THE_SAME]["median"] == 1.25
    without = served.table([load], ["sipipe"], [{load.name: {"sipipe": [figures(1)]}}])
    assert without[0]["of stock's best"] is None


def test_every_server_gets_every_load_in_turn_and_they_change_places(monkeypatch):
    sent = []

    class Client:
        def __init__(self, job, url):
            self.name = url

        def run(self, params, count, prompt, seed, rate):
            sent.append((self.name, count, seed, rate))
            return {"output_throughput": float(count)}

    monkeypatch.setattr(side_by_side.client, "Client", Client)
    monkeypatch.setattr(side_by_side.client, "wait_until_served", lambda *_: None)
    monkeypatch.setattr(side_by_side, "SPIN", 0.0)
    one = Load("one", "greedy", 7, 0.0, [], repeat=2, learnt=5)
    two = Load("two", "chat", 9, 4.0, [])
    servers = {name: {"command": [], "env": {}, "url": name} for name in ("a", "b")}
    job = {"servers": servers, "model": "m", "loads": [one._asdict(), two._asdict()], "first": 100}
    runs = side_by_side.drive(job)["runs"]
    assert sorted(sent[:4]) == [(n, 3, 100, r) for n in ("a", "b") for r in (0.0, 4.0)]
    assert sent[4:] == [
        ("a", 5, 100, 0.0),
        ("b", 5, 100, 0.0),
        ("a", 7, 101, 0.0),
        ("b", 7, 101, 0.0),
        ("b", 9, 102, 4.0),
        ("a", 9, 102, 4.0),
        ("b", 7, 103, 0.0),
        ("a", 7, 103, 0.0),
    ]
    assert {load: {name: len(each) for name, each in of.items()} for load, of in runs.items()} == {
        "one": {"a": 2, "b": 2},
        "two": {"a": 1, "b": 1},
    }


def test_peers_are_compared_with_sipipes_one_stage():
    settings = [("short", "greedy", 64)]
    rounds = [{"short, greedy, 64": {"sipipe-one": [figures(80)], "llama.cpp": [figures(50)]}}]
    rows = peers.table(settings, ["sipipe-one", "llama.cpp"], rounds, [[100.0]])
    assert [(row["engine"], row["of SiPipe's one stage"]) for row in rows] == [
        ("sipipe-one", 1.0),
        ("llama.cpp", 0.625),
        ("OpenVINO", 1.25),
    ]


def test_peers_are_asked_from_the_command_to_the_result(monkeypatch):
    """All but what answers, which is a stand-in."""
    kept = []
    started = []

    def answer(servers, model, loads, **_):
        started.append({name: job["command"] for name, job in servers.items()})
        return {load.name: {name: [figures(80)] for name in servers} for load in loads}

    monkeypatch.setattr(peers, "converted", lambda _: Path("model.gguf"))
    monkeypatch.setattr(peers, "llama_cpp", lambda *_: {"command": ["llama"], "env": {}, "url": ""})
    monkeypatch.setattr(peers, "openvino", lambda _, settings: [100.0] * len(settings))
    monkeypatch.setattr(peers, "answered", answer)
    monkeypatch.setattr(peers, "report", lambda *of, **_: kept.append(of))
    monkeypatch.setattr("sys.argv", ["peers", "MODEL"])
    peers.main()
    (reported,) = kept
    _, _, rows = reported
    assert {row["engine"] for row in rows} == {"sipipe-one", "stock-one", "llama.cpp", "OpenVINO"}
    assert len(rows) == 4 * len(peers.SETTINGS)
    first, second = started
    assert list(first) == list(second)[::-1], "the next ones start in the other order"
    assert "MODEL" in first["sipipe-one"]


def test_a_peer_that_is_there_is_not_built_again(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    ran = []
    monkeypatch.setattr(peers, "run_step", lambda command, **_: ran.append(command))
    binary = tmp_path / "llama_cpp_python-0.3.36/vendor/llama.cpp/build/bin/llama-server"
    binary.parent.mkdir(parents=True)
    binary.touch()
    (tmp_path / "model.gguf").touch()
    assert peers.converted("models/model") == tmp_path / "model.gguf"
    job = peers.llama_cpp(tmp_path / "model.gguf", requests=8)
    assert job["command"][:3] == [str(binary), "-m", str(tmp_path / "model.gguf")]
    assert job["command"][job["command"].index("-c") + 1] == str(8 * 1024)
    assert not ran
    binary.unlink()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / f"{peers.OPENVINO}.installed").touch()
    peers.llama_cpp(tmp_path / "model.gguf", requests=8)
    assert [command[0] for command in ran] == ["cmake", "cmake"]


def test_a_step_of_an_installation_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    with (
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SiPipeError, match="no-such-program"),
    ):
        peers.run_step(["no-such-program", "x"])


def test_openvino_is_asked_for_the_same_loads(monkeypatch, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / f"{peers.OPENVINO}.installed").touch()
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    asked = []

    def run(command, **_):
        asked.append(json.loads(command[-1]))
        return argparse.Namespace(returncode=0, stdout="a line of its own\n[1.5]\n")

    monkeypatch.setattr(peers.subprocess, "run", run)
    assert peers.openvino(tmp_path / "m.gguf", [("chat", "chat", 8)]) == [1.5]
    (load,) = asked[0]
    assert load == {
        "prompt": [200, 600],
        "tokens": [100, 300],
        "requests": 8,
        "temperature": 0.7,
        "top_p": 0.9,
    }
