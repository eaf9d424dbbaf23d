"""SiPipe's own options are told from vLLM's, which go through untouched."""

import argparse
import json
import socket
import subprocess
import sys
import tempfile

import psutil
import pytest

from sipipe.cli import advice, bench, bench_rows, generate, serve
from sipipe.cli.parser import make_parser, parse_engine_command
from sipipe.config import OPTIONS, STEPS_ASIDE, SiPipeConfig
from sipipe.cores import Core
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.child import measured
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


@pytest.mark.parametrize("name", SiPipeConfig.__struct_fields__)
def test_a_setting_is_an_option_or_is_said_to_be_none(name):
    """Nobody is asked whether they meant the option that they gave."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from sipipe.engine.start.arguments import OneLineParser

    option = f"--{name.replace('_', '-')}"
    parser = make_parser("serve", "", add_help=False)
    parse_engine_command(parser, ["m"])
    assert (name in OPTIONS) == (option in parser.format_help())
    if name not in OPTIONS:
        with pytest.raises(ConfigError, match=rf"^{option} is no option but a setting: .*{name}"):
            OneLineParser().parse_args([option, "1"])


@pytest.mark.parametrize(
    "dotted", ["--additional-config.sipipe.inflight=3", "--additional_config.a.b"]
)
@pytest.mark.parametrize("in_file", [False, True])
def test_an_option_is_json_or_given_key_by_key(tmp_path, dotted, in_file):
    """vLLM would take the keys, and leave the JSON out."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.engine.arg_utils import EngineArgs

    from sipipe.engine.start.arguments import OneLineParser

    parser = EngineArgs.add_cli_args(OneLineParser())
    json_words = ["--additional-config", '{"sipipe": {"samplers": 2}}']
    if in_file:
        file = tmp_path / "options.yaml"
        file.write_text('additional-config: \'{"sipipe": {"samplers": 2}}\'')
        json_words = ["--config", str(file)]
    keys = [dotted] if "=" in dotted else [dotted, "3"]
    for words in ([*keys, *json_words], [*json_words, *keys]):
        with pytest.raises(ConfigError, match=r"^--additional-config is given as JSON, and --add"):
            parser.parse_args(words)
    assert parser.parse_args(keys).additional_config
    assert parser.parse_args(json_words).additional_config["sipipe"] == {"samplers": 2}


def test_vllms_command_is_refused_what_it_would_leave_out(monkeypatch, capsys):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from sipipe.engine.start import plugin, refusals

    json_words = ["--additional-config", '{"sipipe": {"samplers": 2}}']
    words = ["vllm", "serve", "m", *json_words, "--additional-config.sipipe.inflight=3"]
    monkeypatch.setattr("sys.argv", words)
    for module in (plugin, refusals):
        monkeypatch.setattr(module, "is_vllms_command", lambda: True)
    args = argparse.Namespace(distributed_executor_backend="sipipe.Executor")
    with pytest.raises(SystemExit) as end:
        plugin._convert(pytest.fail, object, args)  # noqa: SLF001, as vLLM calls it
    assert end.value.code
    assert "--additional-config is given as JSON, and" in capsys.readouterr().err


def test_ours_are_taken_from_anywhere():
    line = "--samplers 2 model --trace=t --port 1 --inflight auto --tp 4 --trace-limit 64"
    settings, rest = split(*line.split())
    assert settings == {"samplers": 2, "inflight": "auto", "trace": "t", "trace_limit": 64}
    assert rest == ["model", "--port", "1", "-tp", "4"]


@pytest.mark.parametrize(
    ("argv", "settings", "rest"),
    [
        (["--pp", "2", "--", "-5 is"], {}, ["-pp", "2", "--", "-5 is"]),
        (["--pp", "2", "--", "-h"], {}, ["-pp", "2", "--", "-h"]),
        (["--cores", '{"stages": [[0], [1]]}'], {"cores": {"stages": [[0], [1]]}}, []),
        (["--cores", "off"], {"cores": "off"}, []),
        (["--layers", "even"], {"layers": "even"}, []),
        (["--layers", "7,1"], {"layers": [7, 1]}, []),
        (["--sample", "2"], {}, ["--sample", "2"]),  # no abbreviations
    ],
)
def test_values_are_what_they_say(argv, settings, rest):
    assert split("m", *argv) == (settings, ["m", *rest])


def test_prompts_come_from_arguments_or_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert generate.prompts_of([], generate.read_prompts(str(file))) == ["one", "  two "]
    assert generate.prompts_of(["a", "b"], None) == ["a", "b"]
    with pytest.raises(ConfigError, match="not from both"):
        generate.prompts_of(["a"], ["one"])
    with pytest.raises(ConfigError, match=r"cannot read --file .*No such file"):
        generate.read_prompts(str(tmp_path / "none"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        generate.read_prompts(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        generate.read_prompts(str(file))


def test_a_prompt_is_a_line_whatever_characters_are_in_it(tmp_path):
    file = tmp_path / "prompts.txt"
    prompts = ["a\u2028b", "c\x0cd\x85e\x1cf"]
    file.write_text("\n".join(prompts), encoding="utf-8-sig")  # as Windows' editors write it
    assert generate.read_prompts(str(file)) == prompts


def test_a_closed_standard_input_holds_no_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="stdin holds no prompt"):
        generate.read_prompts("-")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["m", "--requests", "0"], "--requests: must be a whole number of 1 or more"),
        (["m", "--sampling", "greedy,beam"], '"beam" is none of'),
        (["m", "--rows", "sipipe,other"], '"other" is none of sipipe, stock'),
        (["m", "--rows", "stock-cut"], "stock-cut wants --layers"),
        (["m", "--url", "SGLang=host:1"], '"SGLang=host:1" is not NAME=http'),
        (["m", "--url", "=http://host:1"], '"=http://host:1" is not NAME=http'),
        (["m", "--url", "a=http://host:99999"], "is not NAME=http"),
        (["m", "--url", "a=http://[::1"], "is not NAME=http"),
        (["m", "--url", "a=http://"], "is not NAME=http"),
        (["m", "--url", "a=httpd://host"], "is not NAME=http"),
        (["--pp", "2"], "name the MODEL first"),
        (["m", "--additional-config", "{bad"], "must be a JSON object"),
        (["m", "--additional-config", "[]"], "must be a JSON object"),
        (["m", "--sampling", "greedy:0"], "--sampling: must be a whole number of 1 or more"),
        (["m", "--row", "a"], '"a" is not NAME=OPTIONS'),
        (["m", "--row", "a=--pp x"], '--pp.*must be a whole number from 1 to 10000, not "x"'),
        (["m", "--row", "a=--pp"], "--pp.*expected one argument"),
        (["m", "--row", "a='"], "a=.*No closing quotation"),
        (["m", "--rows", ","], '--rows "," names no row'),
        (["m", "--row", "a=stock --layers 7,x"], "--layers.*whole number"),
        (["m", "--row", "a=", "--row", "a=stock"], 'two rows are named "a"'),
        (["m", "--row", "a=--additional-config {bad"], "must be a JSON object"),
        (["m", "--goodput", "ttft:fast"], "--goodput: must be limits in ms"),
        (["m", "--sharegpt", "/none"], "--sharegpt: there is no file /none"),
        (["m", "--trace-file", "/none"], "--trace-file: there is no file /none"),
        (["m", "--trace-file", "x" * 300], "--trace-file: there is no file x"),
        (["m", "--trace-file", "/proc/version", "--rate", "2"], "--rate: --trace-file has the arr"),
        (["m", "--output", f"{'x' * 300}/page.html"], "--output: there is no directory x"),
        (["m", "--trace", "t"], "2 engines would write the trace t: --engines 1 starts"),
        (
            [
                *("m", "--rows", "sipipe", "--engines", "1", "--trace", "t"),
                *("--row", 'a=stock --additional-config \'{"sipipe": {"trace": "t"}}\''),
            ],
            "2 engines would write the trace t",
        ),
    ],
)
def test_bench_names_its_mistakes(argv, word):
    with pytest.raises(ConfigError, match=word) as found:
        bench.main(argv)
    assert "\n" not in str(found.value)


START = {
    "startup_s": 1.0,
    "plan": ["core plan: stage 0: core 0"],
    "kv_tokens": 4096,
    "memory_mib": {"sipipe": 10, "VLLM::Worker": 20},
    "answers": [[1, 2], [3, 4]],
    "draws": {"p": 0.5},
}


limits: list[float] = []
"""Seconds that each of them may take."""


@pytest.fixture
def started(monkeypatch):
    """What bench would start, in order; stock is half as quick, and its second answer differs."""
    jobs = []
    limits.clear()

    def start(name, job, module, timeout=0):
        jobs.append((name, job))
        limits.append(timeout)
        speed = 10.0 * len(jobs) / (1 + name.startswith("stock"))
        run = {"output_throughput": speed, "request_goodput": 2.0, "completed": 4, "duration": 8}
        run |= {f"{q}_{metric}_ms": 1.0 for q in ("p50", "p99") for metric in ("ttft", "tpot")}
        answers = [[1, 2], [3, 5 if name.startswith("stock") else 4]]
        runs = {}
        for way, count, prompt, rate in job["loads"]:
            load = f"{way} {count}" + f" prompt={prompt}" * bool(prompt)
            runs[load + f" rate={rate}" * bool(rate)] = [run] * job["repeat"]
        return START | {"answers": answers, "runs": runs}

    monkeypatch.setattr(bench, "require_vllm", lambda: None)
    monkeypatch.setattr(bench, "measured", start)
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    return jobs


def test_bench_starts_each_side_as_it_would_best_be_set_up(started, monkeypatch, capsys):
    cores = [Core((cpu, cpu + 8)) for cpu in range(8)]
    monkeypatch.setattr(bench_rows, "this_machine", lambda: cores)
    argv = ["m", "-pp", "2", "--layers", "7,1", "--samplers", "2", "--max-model-len", "99"]
    argv += ["--row", "traced=stock --pp 4 --worker-cls 'a b'", "--row", "one=--samplers 1"]
    argv += ["--rate", "2,8", "--goodput", "ttft:500,tpot:50"]
    bench.main([*argv, "--url", "other=http://host:1/"])
    names = ["sipipe", "stock", "stock-tp", "stock-one", "sipipe-one", "stock-cut"]
    names += ["traced", "one", "other"]
    assert [name for name, _ in started] == names + names[::-1]
    jobs = dict(started)
    for name, job in jobs.items():
        assert job["load"][-3:] == ["--goodput", "ttft:500", "tpot:50"]
        assert all(mix["ignore_eos"] for mix in job["mixes"].values())
        assert job["loads"] == [
            (way, 64, 0, rate) for rate in (2.0, 8.0) for way in ("greedy", "chat")
        ]
        if name == "other":
            assert (job["command"], job["url"]) == ([], "http://host:1")
            continue
        degrees = {"stock-tp": ("1", "2"), "stock-one": ("1", "1"), "sipipe-one": ("1", "1")}
        degrees["traced"] = ("4", "1")
        pp, tp = degrees.get(name, ("2", "1"))
        command = [word for word in job["command"] if not word.startswith("--samplers")]
        words = [word for word in command[command.index("serve") + 1 :] if "layers" not in word]
        assert words[:3] == ["m", "--max-model-len", "99"]
        assert words[3:-5] == {"traced": ["--worker-cls", "a b"], "one": ["1"]}.get(name, [])
        assert words[-5:] == ["-pp", pp, "-tp", tp, "--no-enable-prefix-caching"]
        bound = {"stock": "0-3|4-7", "stock-tp": "0-3|4-7", "stock-cut": "0-3|4-7"}
        bound |= {"stock-one": "0-7", "traced": "0-1|2-3|4-5|6-7"}
        assert job["env"].get("VLLM_CPU_OMP_THREADS_BIND") == bound.get(name)
    assert jobs["stock-cut"]["env"]["VLLM_PP_LAYER_PARTITION"] == "7,1"
    assert {"--layers=7,1", "--samplers=2"} <= set(jobs["sipipe"]["command"])
    assert "--layers=7,1" not in jobs["sipipe-one"]["command"]
    out = capsys.readouterr().out
    assert "stock-one: worker 0: CPU 0-7" in out
    assert "sipipe: stage 0: core 0" in out


@pytest.mark.parametrize("stages", ["-pp=2", "--pipeline-parallel-size=2", "--pp=2", "-pp 2"])
@pytest.mark.parametrize("ranks", ["-tp=2", "--tensor_parallel_size 2", "--tp 2"])
def test_bench_takes_degrees_in_every_form_that_vllm_does(started, stages, ranks):
    bench.main(["m", *stages.split(), *ranks.split(), "--engines", "1"])
    told = {name: " ".join(job["command"]) for name, job in started}
    asked = {"sipipe": (2, 2), "stock": (2, 2), "stock-tp": (1, 4)}
    asked |= {"stock-one": (1, 1), "sipipe-one": (1, 1)}
    assert list(told) == list(asked)
    for name, (p, t) in asked.items():
        words = told[name].split()
        assert words[words.index("serve") + 1 :][:5] == ["m", "-pp", str(p), "-tp", str(t)]
        assert "parallel" not in told[name]


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        (["--pp", "1"], ["sipipe", "stock"]),
        (["--pp", "2"], ["sipipe", "stock", "stock-tp", "stock-one"]),
        (["--pp", "2", "--samplers", "2"], None),
        (["--pp", "2", "--additional-config", '{"sipipe": {"inflight": 3}}'], None),
    ],
)
def test_on_gpus_bench_says_that_one_stage_is_left_to_vllm(
    started, monkeypatch, capsys, more, rows
):
    """Unless SiPipe is asked for: the row is not stock's once more, which would be measured twice."""
    monkeypatch.setattr(bench_rows, "installed_vllm", lambda: InstalledVllm("vllm", "0.32.0"))
    bench.main(["m", *more, "--engines", "1"])
    every = ["sipipe", "stock", "stock-tp", "stock-one", "sipipe-one"]
    assert [name for name, _ in started] == (rows or every)
    assert capsys.readouterr().err.count(STEPS_ASIDE) == (rows is not None)


def test_degrees_of_bench_may_stand_before_the_model_and_need_a_number(started):
    bench.main(["-pp", "2", "m", "--rows", "stock", "--engines", "1"])
    [(_, job)] = started
    words = job["command"]
    assert words[words.index("serve") + 1 :][:5] == ["m", "-pp", "2", "-tp", "1"]
    with pytest.raises(ConfigError, match=r"-pp.*expected one argument"):
        bench.main(["m", "-pp"])


def test_only_options_get_dashes():
    parser = make_parser("x", "")
    parser.add_argument("--some-name")
    own, rest = parser.parse_known_args(["--some_name", "-- user_name:", "--a_b.c_d", "--e_f=g_h"])
    assert own.some_name == "-- user_name:"
    assert rest == ["--a-b.c_d", "--e-f=g_h"]
    assert parser.parse_known_args(["a_b", "--", "--a_prompt"])[1] == ["a_b", "--", "--a_prompt"]


@pytest.mark.parametrize(
    "option", ["--enable-prefix-caching", "--no-enable-prefix-caching", "--enable_prefix_caching"]
)
def test_prefixes_are_cached_where_that_is_asked_for(started, option):
    """Else each way of sampling would find the prompts of the one before."""
    bench.main(["m", "--pp", "2", "--rows", "sipipe,stock", option])
    for _, job in started:
        found = [word for word in job["command"] if "prefix" in word]
        assert found == [option.replace("_", "-")]


def test_a_row_that_refuses_an_option_does_not_cost_the_others(started, monkeypatch, capsys):
    """Cores of two stages are none of one stage's."""
    works, cores = bench.measured, '{"stages": [[0], [1]], "samplers": [[2]]}'

    def start(name, job, module, timeout=0):
        assert name != "sipipe-one" or not any(cores[:9] in word for word in job["command"])
        if name == "stock":
            raise ConfigError("no such option")
        return works(name, job, module)

    monkeypatch.setattr(bench, "measured", start)
    bench.main(["m", "--pp", "2", "--rows", "sipipe,stock,sipipe-one", "--cores", cores])
    said = capsys.readouterr()
    assert "no such option" in said.err
    assert "sipipe-one" in said.out
    with pytest.raises(ConfigError, match="no such option"):
        bench.main(["m", "--pp", "2", "--rows", "stock,sipipe"])
    started.clear()
    bench.main(["m", "--pp", "2", "--rows", "sipipe-one", "--cores", "off"])
    assert all("--cores=off" in job["command"] for _, job in started)


def test_answers_may_end_where_the_model_ends_them(started):
    bench.main(["m", "--pp", "2", "--rows", "sipipe", "--own-end"])
    assert not any(mix["ignore_eos"] for _, job in started for mix in job["mixes"].values())


def test_bench_shows_medians_ranges_and_what_each_row_computes(started, capsys, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    assert bench.main(["m", "--pp", "2", "--rows", "sipipe,stock", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [name for name, _ in started] == ["sipipe", "stock", "stock", "sipipe"]
    row, stock = found["rows"][:2]
    assert (row["engine"], row["tok/s"], row["of stock's best"]) == ("sipipe", "25 (10-40)", "2.00")
    assert (stock["engine"], stock["tok/s"]) == ("stock", "12 (10-15)")
    assert (row["equal"], stock["equal"], row["draws p"]) == ("2 of 2", "1 of 2", "0.500")
    assert (row["KV tokens"], row["memory MiB"], row["goodput/s"]) == (4096, 30, "2.00")
    assert found["machine"]["cores"] >= 1
    assert found["command"] == "sipipe bench m --pp 2 --rows sipipe,stock --json"
    assert "medians and ranges" in found["note"]
    # Both sides inherit it, and no row says otherwise.
    assert "LD_PRELOAD: libtcmalloc.so" in found["note"]
    assert not any("LD_PRELOAD" in job["env"] for _, job in started)
    assert not any("answers" in s for each in found["engines"].values() for s in each["starts"])


def test_benchs_client_reads_the_model_as_its_servers_do(started):
    bench.main(["m", "--rows", "sipipe", "--tokenizer", "t", "--trust-remote-code"])
    ((_, job), *_) = started
    assert job["load"][-3:] == ["--tokenizer", "t", "--trust-remote-code"]
    assert {"--tokenizer", "--trust-remote-code"} < set(job["command"])


@pytest.mark.parametrize("option", ["--nnodes", "-n", "--nnodes=2"])
def test_bench_refuses_hosts_that_nobody_starts(started, option):
    with pytest.raises(ConfigError, match=r"^bench: --nnodes: several hosts by Ray alone"):
        bench.main(["m", "--rows", "sipipe", option, "2"])
    assert not started


def test_bench_also_writes_a_page_and_refuses_first_where_it_could_not(
    started, capsys, tmp_path, monkeypatch
):
    argv = ["m", "--pp", "2", "--rows", "sipipe", "--rate", "0.5,8", "--output"]
    with pytest.raises(ConfigError, match=r"--output: there is no directory .*/none"):
        bench.main([*argv, str(tmp_path / "none" / "load.html")])
    with pytest.raises(ConfigError, match=f"--output: no file can be written at {tmp_path}$"):
        bench.main([*argv, str(tmp_path)])
    with monkeypatch.context() as closed:
        closed.setattr(bench.os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(ConfigError, match=r"no file can be written at .*/load.html$"):
            bench.main([*argv, str(tmp_path / "load.html")])
    assert not list(tmp_path.iterdir())
    assert not started
    assert bench.main([*argv, str(tmp_path / "load.html"), "--json"]) == 0
    page = (tmp_path / "load.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["rows"] == json.loads(capsys.readouterr().out)["rows"]
    assert {row["rate"] for row in data["rows"]} == {0.5, 8.0}
    with pytest.raises(ConfigError, match=r"--output .*: No space left on device"):
        bench.main([*argv, "/dev/full"])
    assert "sipipe: stage 0" in capsys.readouterr().out, "what was measured is shown first"


def test_brackets_in_a_rows_name_are_only_its_name_and_the_page_is_there_whoever_reads(
    started, capsys, tmp_path, monkeypatch
):
    argv = ["m", "--rows", "sipipe", "--engines", "1", "--row", "a [/red] row=stock"]
    assert bench.main(argv) == 0
    assert "a [/red] row" in capsys.readouterr().out

    def gone(_):
        raise BrokenPipeError

    monkeypatch.setattr(bench, "show", gone)
    with pytest.raises(BrokenPipeError):
        bench.main([*argv, "--output", str(tmp_path / "load.html")])
    assert (tmp_path / "load.html").exists()


def test_an_engine_may_take_as_long_as_its_requests_arrive(started, tmp_path):
    argv = ["m", "--rows", "sipipe", "--engines", "2", "--repeat", "3", "--requests", "100"]
    argv += ["--json", "--sampling", "greedy,chat"]
    bench.main([*argv, "--rate", "0.01,0.1"])
    assert limits == [3600 + (3 + 1) * 2 * (10_000 + 1_000)] * 2
    assert [job["start"] for _, job in started] == [0, 1]
    trace = tmp_path / "arrivals.jsonl"
    arrives = '{{"timestamp": {}, "input_length": {}, "hash_ids": [1]}}\n'.format
    trace.write_text("".join(arrives(at, 16) for at in range(0, 2000, 10)))
    bench.main([*argv, "--trace-file", str(trace)])
    assert limits[2:] == [3600 + (3 + 1) * 2 * 990] * 2
    with pytest.raises(ConfigError, match="fewer than --requests"):
        bench.main([*argv, "--requests", "300", "--trace-file", str(trace)])
    argv += ["--requests", "1"]
    trace.write_text(arrives(1, 512))
    with pytest.raises(ConfigError, match="hash_ids of other than 16 tokens"):
        bench.main([*argv, "--trace-file", str(trace)])
    trace.write_text(arrives(3_600_000, 16))  # ms
    with pytest.raises(ConfigError, match="would arrive for 7200000 s"):
        bench.main([*argv, "--trace-file", str(trace)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 requests, one a line: fewer than --requests"),
        (b"{}", "line 1: must be a JSON object with timestamp, input_length and hash_ids"),
        (b"[1]", "line 1: must be a JSON object"),
        (b'{"timestamp": "noon", "input_length": 1, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1%s, "input_length": 1, "hash_ids": [1]}' % (b"0" * 400), "line 1: must"),
        (b'{"timestamp": NaN, "input_length": 1, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": -5, "input_length": 1, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1e999, "input_length": 1, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1, "input_length": 0, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1, "input_length": 1.5, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1, "input_length": true, "hash_ids": [1]}', "line 1: must be"),
        (b'{"timestamp": 1, "input_length": 1, "hash_ids": "a"}', "line 1: must be"),
        (b'{"timestamp": 1, "input_length": 1, "hash_ids": [{}]}', "line 1: must be"),
        (b"{bad", "line 1: must be a JSON object"),
        (b"[" * 100_000, "line 1: must be a JSON object"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_its_line(started, tmp_path, content, said):
    trace = tmp_path / "arrivals.jsonl"
    trace.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--trace-file {trace}.*{said}") as found:
        bench.main(["m", "--rows", "sipipe", "--requests", "1", "--trace-file", str(trace)])
    assert "Error" not in str(found.value)


def test_drafts_are_for_stock_of_one_stage_too(started):
    asked = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    argv = ["m", "--pp", "2", "-sc", asked, "--rows", "sipipe,stock,stock-one"]
    assert bench.main([*argv, "--engines", "1", "--json"]) == 0
    told = {name: job["command"] for name, job in started}
    assert told["sipipe"][told["sipipe"].index("-sc") + 1] == asked
    assert asked not in told["stock"]
    assert told["stock-one"][-2:] == ["--speculative-config", asked]


def test_one_run_is_shown_without_a_range_and_a_way_has_its_own_requests(started, capsys):
    argv = ["m", "--pp", "2", "--rows", "sipipe,stock", "--engines", "1", "--repeat", "1"]
    argv += ["--row", "deep=stock -pp=4 --layers 3,2,2,1", "--row", "wide=stock --pp=1 --tp 2"]
    argv += ["--url", "here=http://host:1"]
    assert bench.main([*argv, "--sampling", "greedy,top-p:16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["sampling"], row["requests"], row["engine"]): row for row in found["rows"]}
    assert next(iter(rows)) == ("top-p", 16, "sipipe")
    assert {key[:2] for key in rows} == {("top-p", 16), ("greedy", 64)}
    assert rows["greedy", 64, "sipipe"]["tok/s"] == "10"
    best = {row: rows["greedy", 64, row]["of stock's best"] for row in ("sipipe", "stock", "here")}
    same = {row: rows["greedy", 64, row]["of stock with the same stages"] for row in best}
    assert best == {"sipipe": "0.25", "stock": "0.25", "here": "1.25"}
    assert same == {"sipipe": "1.00", "stock": "1.00", "here": "1.25"}
    assert "one run a row" in found["note"]
    jobs = dict(started)
    assert jobs["deep"]["env"]["VLLM_PP_LAYER_PARTITION"] == "3,2,2,1"
    assert jobs["deep"]["command"][-5:-1] == ["-pp", "4", "-tp", "1"]
    assert jobs["wide"]["command"][-5:-1] == ["-pp", "1", "-tp", "2"]
    assert "VLLM_PP_LAYER_PARTITION" not in jobs["wide"]["env"]


def test_prompts_of_several_lengths(started, capsys):
    argv = ["m", "--pp", "2", "--rows", "sipipe,stock", "--engines", "1", "--tokens", "1"]
    argv += ["--requests", "4", "--sampling", "greedy", "--prompt-tokens"]
    assert bench.main([*argv, "2048,8192"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("4,096") == 2
    assert bench.main([*argv, "2048,8192", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["prompt"], row["engine"], row["prompt tok/s"]) for row in rows] == [
        (2048, "sipipe", "1,024"),
        (2048, "stock", "1,024"),
        (8192, "sipipe", "4,096"),
        (8192, "stock", "4,096"),
    ]
    assert bench.main([*argv, "2048"]) == 0
    assert "1,024" not in capsys.readouterr().out
    assert started[-1][1]["load"][:4] == ["--dataset-name", "random", "--random-input-len", "2048"]


def test_a_row_whose_answers_cannot_be_compared_stays(started, monkeypatch, capsys):
    works = bench.measured
    refused = {"answers": None, "draws": None, "refused": "HTTPError: HTTP Error 400: Bad Request"}

    def start(name, job, module, timeout=0):
        texts = {"answers": ["a", "b"], "draws": None}
        return works(name, job, module) | {"stock": refused, "stock-one": texts}.get(name, {})

    monkeypatch.setattr(bench, "measured", start)
    argv = ["m", "--pp", "2", "--rows", "stock,sipipe,stock-one", "--sampling", "greedy", "--json"]
    assert bench.main(argv) == 0
    printed = capsys.readouterr()
    rows = {row["engine"]: row for row in json.loads(printed.out)["rows"]}
    assert rows["stock"]["tok/s"]
    assert rows["stock"]["equal"] is rows["stock"]["draws p"] is rows["stock-one"]["equal"] is None
    assert rows["sipipe"]["equal"] == "2 of 2"
    assert printed.err.count("HTTP Error 400") == 1
    assert "stock: what it answers could not be compared" in printed.err


@pytest.mark.parametrize("asked", [False, True])
def test_stages_on_one_gpu_are_refused_unless_asked_for(started, asked):
    config = json.dumps({"sipipe": {"devices": [0, 0]}})
    argv = ["m", "--pp", "2", "--additional-config", config, *["--shared-devices"] * asked]
    if asked:
        bench.main(argv)
    else:
        with pytest.raises(ConfigError, match=r'"devices" \[0, 0\].*--shared-devices'):
            bench.main(argv)
    assert bool(started) is asked


@pytest.fixture
def python(monkeypatch, tmp_path):
    """Has a script of the shell run in Python's place."""
    engine = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(engine))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def does(script):
        engine.write_text(f"#!/bin/sh\n{script}\n")
        engine.chmod(0o755)

    return does


def test_bench_names_the_cause_and_keeps_the_log_of_a_side_that_fails(
    python, monkeypatch, tmp_path
):
    said = ("WARNING: may be OSError: 24", "RuntimeError: no memory", "KeyError: 1")
    python("\n".join([*(f"echo '{line}' >&2" for line in said), "exit 1"]))
    monkeypatch.setattr(bench, "require_vllm", lambda: None)
    with pytest.raises(SiPipeError, match=r"sipipe failed: RuntimeError: no memory \(log: ") as it:
        bench.main(["m", "--pp", "2", "--rows", "sipipe"])
    assert "\n" not in str(it.value)
    (kept,) = tmp_path.glob("sipipe-bench-sipipe-*.log")
    assert "KeyError" in kept.read_text()
    with pytest.raises(SiPipeError, match=r"w/o b failed: RuntimeError: no memory \(log: "):
        bench.main(["m", "--pp", "2", "--rows", "", "--row", "w/o b=--samplers 1"])
    assert list(tmp_path.glob("sipipe-bench-w-o-b-*.log"))


@pytest.mark.parametrize(
    ("says", "kind", "words"),
    [
        ("printf '\\377 --x is wrong\\n' >&2", ConfigError, "--x is wrong"),
        ("true", SiPipeError, "a failed: no error in its log"),
    ],
)
def test_a_measured_engine_that_refuses_an_option_may_say_anything(python, says, kind, words):
    python(f"{says}\nexit 2")
    with pytest.raises(kind, match=words):
        measured("a", {}, "any")


def test_what_a_measured_engine_leaves_behind_is_ended(python, tmp_path):
    """Such as a server that takes too long to end."""
    python(f"sleep 300 >/dev/null 2>&1 &\necho $! > {tmp_path}/pid\necho '{{}}'")
    assert measured("a", {}, "any") == {}
    left = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


MEASURES = """
import subprocess, sys, time
from sipipe.tools.child import answer
def work(job):
    print(subprocess.Popen(["sleep", "300"]).pid, file=sys.stderr, flush=True)
    time.sleep(300)
answer(work)
"""


def test_what_measures_ends_with_all_that_it_started_when_it_is_told_to():
    """As where its parent is, which ends nothing any more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", MEASURES, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdin.write(b"{}")
        process.stdin.close()
        started = psutil.Process(int(process.stderr.readline()))
        process.terminate()
        assert process.wait(20) == 143
        process.stderr.close()
    psutil.wait_procs([started], 20)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE


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
    node, found, _ = hosts("m", "-n", "2", "--master-addr", "head")
    assert (node, found) == (0, {"count": 2, "address": "head"})
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
        (
            "--nnodes 2 --master-port 70000",
            '--master-port: must be .* from 1 to 65000, not "70000"',
        ),
    ],
)
def test_hosts_that_cannot_be_are_one_line(flags, line):
    with pytest.raises(ConfigError, match=line):
        hosts("m", *flags.split())


@pytest.fixture
def served(monkeypatch):
    """``sipipe serve`` of a line of words, on two cores or beside GPUs: what vLLM is given."""
    monkeypatch.setattr(serve, "require_vllm", lambda: None)
    monkeypatch.setattr(advice, "this_machine", lambda: [Core((0,)), Core((1,))])
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(advice, "measured", dict)

    def served(line, build="vllm-cpu", gpus=()):
        started = []
        monkeypatch.setattr(serve, "installed_vllm", lambda: InstalledVllm(build, "0.32.0"))
        monkeypatch.setattr(serve, "gpus_here", lambda: list(gpus))
        monkeypatch.setattr(serve, "supervise", lambda given, **_: started.append(given) or 0)
        assert serve.main(line.split()) == 0
        ((rest, _, _),) = started
        return rest

    return served


@pytest.mark.parametrize(
    ("line", "build", "said"),
    [
        ("qwen3-0.6b --pp 2", "vllm-cpu", True),
        ("qwen3-0.6b --pipeline-parallel-size 2", "vllm-cpu", True),
        ("qwen3-0.6b --pp 1", "vllm-cpu", False),
        ("qwen3-0.6b --pp 2", "vllm", False),
        ("no/such-model --pp 2", "vllm-cpu", False),
    ],
)
def test_serve_says_which_degrees_may_be_quicker_here(served, capsys, line, build, said):
    """And starts all the same."""
    served(line, build)
    told = capsys.readouterr().err
    assert ("by --pp 1" in told and "sipipe bench" in told and "1 at once" in told) == said
    assert bool(told) == said


def test_a_model_option_without_a_value_is_left_to_vllm(served, capsys):
    """A parser that only looks for the model's name would end the command, with its own usage."""
    assert served("--pp 2 --model") == ["--model", "-pp", "2"]
    assert capsys.readouterr().err == ""


def test_pp_auto_takes_what_is_computed_for_the_model_and_the_machine(served, capsys):
    rest = served("--restart qwen3-0.6b --pp auto --port 80")
    assert rest[:3] == ["qwen3-0.6b", "--port", "80"]
    told = capsys.readouterr().err
    (stages,) = (rest[at + 1] for at, word in enumerate(rest) if word == "-pp")
    assert stages in "12"
    assert f"--pp auto: --pp {stages} --tp 1 (by requests at once, 1: --pp 1" in told
    assert told.count("\n") == 1


H100 = "NVIDIA H100 80GB HBM3"


def test_pp_auto_on_gpus_has_all_of_them(served):
    rest = served("llama-3.1-8b --pp auto", "vllm", [H100] * 4)
    degrees = [int(rest[rest.index(word) + 1]) for word in ("-pp", "-tp")]
    assert degrees[0] * degrees[1] == 4


def test_pp_auto_has_the_gpus_that_it_may_use(served, monkeypatch):
    lines = [f"{H100}, 81559 MiB, 570.{index}" for index in range(8)]
    monkeypatch.setattr(advice, "output", lambda *_: "\n".join(lines))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert advice.gpus_here() == lines
    for visible, shown in {
        "2, 3": [2, 3],
        "": [],
        "-1": [],
        "5,-1,0": [5],
        "9,0": [],
        "GPU-8932f937,GPU-1b2c": [0, 1],
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert advice.gpus_here() == [lines[index] for index in shown], visible
    # 256 requests at once do not fit beside the weights; they would wait.
    rest = served("qwen3-32b --pp auto", "vllm", [H100])
    assert sorted(rest[-4:]) == ["-pp", "-tp", "1", "1"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--port 80 m --pp auto", "name the MODEL first"),
        ("m --pp", "argument --pp"),
        ("m --pp automatic", "--pp.*automatic"),
        ("no/such --pp auto", "neither a directory"),
        ("m --pp auto --tp 2", "--pp auto: .*leave --tp out"),
        ("m --pp auto --nnodes=2", "--pp auto: .*leave --nnodes out"),
        ("m --pp auto --data-parallel-size 2", "--pp auto: .*leave --data-parallel-size out"),
        ("m --pp auto --tensor_parallel_size 2", "--pp auto: .*leave --tensor-parallel-size out"),
        (
            "m --pp auto --distributed-executor-backend ray",
            "--pp auto: .*leave --distributed-executor-backend out",
        ),
    ],
)
def test_a_wrong_pp_is_one_line(served, line, words):
    with pytest.raises(ConfigError, match=words):
        served(line)


def test_pp_auto_is_for_serve():
    with pytest.raises(ConfigError, match="--pp auto is an option of sipipe serve"):
        generate.main(["m", "--pp", "auto", "hi"])
