"""SiPipe's own options are told from vLLM's, which go through untouched."""

import json
from types import SimpleNamespace

import pytest

from sipipe.cli import bench, generate, serve
from sipipe.cli.parser import make_parser, parse_engine_command
from sipipe.cores import Core
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.planner import advice
from sipipe.versions import InstalledVllm


def split(*argv):
    _, settings, rest = parse_engine_command(make_parser("serve", "", add_help=False), argv)
    return settings, rest


@pytest.mark.parametrize(
    "argv",
    [
        ["model"],
        ["--port", "8000", "model", "-O0", "-cc.mode=none", "--help=ModelConfig"],
        ["model", "--additional-config", '{"sipipe": {"samplers": 2}}', "--no-enforce-eager"],
        ["model", "--limit-mm-per-prompt.image", "3", "-tp", "2", "-pp=2"],
    ],
)
def test_what_is_not_ours_is_left_as_it_is(argv):
    assert split(*argv) == ({}, argv)


def test_ours_are_taken_from_anywhere():
    settings, rest = split(
        "--samplers", "2", "model", "--trace=t", "--port", "1", "--inflight", "auto", "--tp", "4",
        "--trace-limit", "64",
    )  # fmt: skip
    assert settings == {"samplers": 2, "inflight": "auto", "trace": "t", "trace_limit": 64}
    assert rest == ["model", "--port", "1", "-tp", "4"]


def test_degrees_stay_in_front_of_what_is_no_option():
    assert split("m", "--pp", "2", "--", "-5 is")[1] == ["m", "-pp", "2", "--", "-5 is"]


def test_cores_as_json():
    settings, _ = split("m", "--cores", '{"stages": [[0], [1]]}')
    assert settings == {"cores": {"stages": [[0], [1]]}}
    assert split("m", "--cores", "off")[0] == {"cores": "off"}


def test_layers_by_name_or_by_number():
    assert split("m", "--layers", "even")[0] == {"layers": "even"}
    assert split("m", "--layers", "7,1")[0] == {"layers": [7, 1]}


def test_abbreviations_are_not_taken():
    assert split("m", "--sample", "2") == ({}, ["m", "--sample", "2"])


def test_prompts_come_from_arguments_or_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert generate._prompts([], str(file)) == ["one", "  two "]
    assert generate._prompts(["a", "b"], None) == ["a", "b"]
    with pytest.raises(ConfigError, match="not from both"):
        generate._prompts(["a"], str(file))
    with pytest.raises(ConfigError, match=r"cannot read --file .*No such file"):
        generate._prompts([], str(tmp_path / "none"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        generate._prompts([], str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        generate._prompts([], str(file))


def test_completions_are_shown_as_text_and_as_json(capsys):
    completion = SimpleNamespace(
        index=0, prompt="Hi", text=" you", token_ids=[7], finish_reason="length", error=""
    )
    for event, text in (("begin", ""), ("text", " you"), ("end", "")):
        generate._show_text(event, completion, text)
        generate._show_json(event, completion, text)
    out = capsys.readouterr().out
    assert out.startswith("Hi you")
    assert json.loads(out.splitlines()[-1]) == {
        "index": 0,
        "prompt": "Hi",
        "text": " you",
        "token_ids": [7],
        "finish_reason": "length",
        "error": "",
    }


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["m", "--requests", "0"], "--requests: must be a whole number of 1 or more"),
        (["m", "--sampling", "greedy,beam"], '"beam" is none of'),
        (["m", "--only", "other"], "--only"),
    ],
)
def test_bench_names_its_mistakes(argv, word):
    with pytest.raises(ConfigError, match=word):
        bench.main(argv)


@pytest.mark.parametrize("asked", [False, True])
def test_bench_says_whether_stages_may_share_a_gpu(monkeypatch, asked):
    jobs = []
    monkeypatch.setattr(bench, "require_vllm", lambda: None)
    monkeypatch.setattr(bench, "measure_sides", lambda job, *_, **__: jobs.append(job) or {})
    bench.main(["m", "--pp", "2", "--json", *["--shared-devices"] * asked])
    assert jobs[0]["shared_devices"] is asked


def test_bench_prints_both_sides(capsys):
    results = {
        "stock": {"tokens_per_second": {"greedy": [10.0, 20.0, 30.0]}},
        "sipipe": {"tokens_per_second": {"greedy": [50.0]}},
    }
    bench._show(results, 64, 16)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["greedy", "20", "50", "2.50x"]


def test_bench_names_the_cause_and_keeps_the_log_of_a_side_that_fails(monkeypatch, tmp_path):
    engine = tmp_path / "python"
    engine.write_text(
        "#!/bin/sh\necho 'RuntimeError: no memory' >&2\necho 'KeyError: 1' >&2\nexit 1\n"
    )
    engine.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(engine))
    monkeypatch.setattr(bench.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bench, "require_vllm", lambda: None)
    with pytest.raises(SiPipeError, match=r"stock failed: RuntimeError: no memory \(log: ") as it:
        bench.main(["m", "--pp", "2"])
    assert "\n" not in str(it.value)
    (kept,) = tmp_path.glob("sipipe-bench-stock-*.log")
    assert "KeyError" in kept.read_text()


def hosts(*argv):
    parser = make_parser("serve", "", add_help=False)
    serve.add_host_options(parser)
    own, _, rest = parse_engine_command(parser, argv)
    return *serve.hosts_of(own), rest


def test_hosts_are_told_by_vllms_own_flags():
    flags = "m -pp 2 --nnodes 2 --node-rank 1 --master-addr head --master-port 1234 --headless"
    node, found, rest = hosts(*flags.split())
    assert (node, found) == (1, {"count": 2, "address": "head", "port": 1234})
    assert rest == ["m", "-pp", "2"]
    assert hosts("m", "-n", "2", "--master-addr", "head")[:2] == (
        0,
        {"count": 2, "address": "head"},
    )
    assert hosts("m", "--nnodes", "1")[:2] == (0, {})
    # With Ray, which says how many hosts there are.
    assert hosts("m", "--master-port", "1234")[:2] == (0, {"port": 1234})


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--nnodes two", '--nnodes/-n: must be a whole number of 1 or more, not "two"'),
        ("--nnodes 2 --node-rank 2", "--node-rank 2: with --nnodes 2, hosts are 0 to 1"),
        ("--node-rank 1", "--node-rank 1: with --nnodes 1, hosts are 0 to 0"),
        ("--headless", "--headless is for the other hosts"),
        ("--nnodes 2 --master-port 70000", '"hosts.port" must be a port from 1 to 65000'),
    ],
)
def test_hosts_that_cannot_be_are_one_line(flags, line):
    with pytest.raises(ConfigError, match=line):
        hosts("m", *flags.split())


@pytest.mark.parametrize(
    ("argv", "device", "said"),
    [
        (["qwen3-0.6b", "--pp", "2"], "vllm-cpu", True),
        (["qwen3-0.6b", "--pipeline-parallel-size", "2"], "vllm-cpu", True),
        (["qwen3-0.6b", "--pp", "1"], "vllm-cpu", False),
        (["qwen3-0.6b", "--pp", "2"], "vllm", False),
        (["no/such-model", "--pp", "2"], "vllm-cpu", False),
    ],
)
def test_serve_says_which_degrees_may_be_quicker_here(monkeypatch, capsys, argv, device, said):
    started = []
    monkeypatch.setattr(serve, "require_vllm", lambda: None)
    monkeypatch.setattr(serve, "installed_vllm", lambda: InstalledVllm(device, "0.32.0"))
    monkeypatch.setattr(serve, "supervise", lambda arguments, **_: started.append(arguments) or 0)
    monkeypatch.setattr(advice, "this_machine", lambda: [Core((0,)), Core((1,))])
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: {0, 1})
    assert serve.main(argv) == 0
    assert started, "it starts all the same"
    told = capsys.readouterr().err
    assert ("with --pp 1" in told and "sipipe bench" in told and "1 at once" in told) == said
    assert bool(told) == said
