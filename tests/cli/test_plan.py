"""`sipipe plan` as people run it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.tools.planner.planned import config

from sipipe.cli import main
from sipipe.tools.planner.hardware import assumptions

HOSTS = ("--gpu", "h100", "--hosts", "2", "--gpus-per-host", "8")


def plan(capsys, *arguments):
    status = main(["plan", *arguments])
    out, error = capsys.readouterr()
    assert error == ""
    return status, out


def test_what_is_recommended_is_the_first_row_and_has_a_command_for_each_host(capsys):
    _, out = plan(capsys, "llama-3.1-70b", *HOSTS, "--tpot-slo", "50ms")
    assert "run on a GPU" not in out
    greedy, everything = out.split("sampling: ")[1:]
    for part in (greedy, everything):
        lines = [line.split() for line in part.splitlines()]
        commands = [words for words in lines if words[1:2] == ["serve"]]
        assert len(commands) == 2
        degrees = [commands[0][commands[0].index(name) + 1] for name in ("-pp", "-tp")]
        rows = [words for words in lines if words[:1] in (["sipipe"], ["vllm-async"])]
        first = rows[0]
        assert first[1:3] == degrees
        fastest = part.split("fastest: ")[1]
        assert fastest.startswith("SiPipe, " if first[0] == "sipipe" else "stock vLLM")


def test_stock_wins_by_name(capsys):
    """The issue's example: its own table showed what was recommended to be slower."""
    _, out = plan(capsys, "mixtral-8x7b", "--gpu", "h100", "--gpus-per-host", "2")
    assert "fastest: stock vLLM (vllm-async), P1T2" in out
    assert "vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1 -pp 1 -tp 2" in out
    assert "sipipe serve" not in out


@pytest.mark.ci
@pytest.mark.parametrize("number", ["0", "1e-9", "1e9"])
def test_any_number_that_is_taken_is_computed_with(capsys, number):
    words = ("llama-3.1-8b", "--gpu", "h100", "--gpus-per-host", "2", "--sampling", "greedy")
    for name in assumptions():
        assert main(["plan", *words, "--assume", f"{name}={number}"]) in (0, 1, 2), name
        said = capsys.readouterr().err
        assert said.count("\n") <= 1, said


def test_inputs_that_are_assumed_are_listed_and_can_be_stated(capsys):
    _, out = plan(capsys, "--assumptions")
    for name in ("engine.vllm.transfer_us", "link.pcie4.hop_us", "network.hop_us"):
        assert name in out
    common = ("llama-3.1-8b", "--gpu", "h100", "--gpus-per-host", "2", "--sampling", "greedy")
    _, out = plan(capsys, *common, "--json")
    before = json.loads(out)["greedy"]["choices"][0]
    assert before["throughput_range"][0] < before["throughput"] < before["throughput_range"][1]
    assert before["kv_tokens_range"][0] < before["kv_tokens"] < before["kv_tokens_range"][1]
    assume = ("--assume", "efficiency.memory=0.8", "--assume", "efficiency.compute=0.4")
    _, out = plan(capsys, *common, "--json", *assume)
    assert json.loads(out)["greedy"]["choices"][0]["throughput"] < before["throughput"]
    _, out = plan(capsys, *common, "--json", "--assume", "efficiency.workspace_gib=9")
    assert json.loads(out)["greedy"]["choices"][0]["kv_tokens"] < before["kv_tokens"]

    def slowed(name):
        words = ("llama-3.1-8b", "--gpu", "4090", "--gpus-per-host", "2", "--hosts", "2")
        rows = [
            {(r["engine"], r["p"]): r["throughput"] for r in json.loads(out)["greedy"]["choices"]}
            for more in ((), ("--assume", f"{name}=5000"))
            for out in [plan(capsys, *words, "--sampling", "greedy", "--json", *more)[1]]
        ]
        return {key for key, rate in rows[0].items() if rows[1][key] < rate}

    assert ("vllm-async", 2) in slowed("network.hop_us")
    assert ("vllm-async", 4) in slowed("link.pcie4-no-p2p.hop_us")


def test_the_pages_example_is_what_the_command_prints(capsys):
    page = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    example = page.split("```console\n$ ")[1].split("\n```")[0]
    command, *lines = example.splitlines()
    _, out = plan(capsys, *shlex.split(command)[2:])
    printed = [line.rstrip() for line in out.splitlines()]
    assert printed[: len(lines)] == lines, "docs/planner.md: paste what is printed now"


def test_the_sizes_of_the_faq_are_what_the_command_says(capsys):
    page = (Path(__file__).parents[2] / "docs/faq.md").read_text()
    rows = re.findall(
        r"^\| `(.+?)` \| [^|]+ \| (\w+) \| (\w+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)", page, re.M
    )
    assert len(rows) > 8
    for command, *shown in rows:
        _, out = plan(capsys, *shlex.split(command), "--sampling", "greedy")
        said = re.search(
            r"best row \((\w+)\) / stock's \((\w+)\): ([\d.]+)x, from ([\d.]+) to ([\d.]+)",
            " ".join(out.split()),
        )
        assert said is not None
        assert list(said.groups()) == shown, command


def serve_options(command):
    """SiPipe's settings in a serve command, and what is left for vLLM's parser."""
    from sipipe.cli.parser import make_parser, parse_engine_command

    parser = make_parser("serve", "", add_help=False)
    _, settings, rest = parse_engine_command(parser, shlex.split(command)[2:])
    return settings, rest


def test_serve_command_is_one_that_serve_takes(capsys):
    _, out = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--gpus-per-host", "4", "--json")
    found = json.loads(out)["greedy"]["choices"]
    commands = [command for row in found if row["engine"] == "sipipe" for command in row["serve"]]
    assert len(commands) == 3
    for command in commands:
        settings, rest = serve_options(command)
        assert {"samplers"} <= set(settings) <= {"samplers", "inflight"}
        assert rest[0] == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.slow
@pytest.mark.engine
def test_vllm_takes_the_rest_of_the_serve_command(capsys):
    serve = pytest.importorskip("vllm.entrypoints.cli.serve")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, out = plan(capsys, "llama-3.1-8b", *HOSTS, "--kv-cache-dtype", "fp8", "--json")
    rows = json.loads(out)["greedy"]["choices"]
    subcommands = FlexibleArgumentParser().add_subparsers()
    parser = serve.ServeSubcommand().subparser_init(subcommands)
    for command in [command for row in rows for command in row["serve"]]:
        _, rest = serve_options(command)
        parsed = parser.parse_args(rest)
        assert parsed.pipeline_parallel_size * parsed.tensor_parallel_size == 16
        assert parsed.nnodes == 2
        # Only the host that listens has API servers.
        assert parsed.headless is (parsed.node_rank == 1)
        assert not (parsed.headless and parsed.api_server_count)


def test_nothing_fits_is_status_one_and_says_why(capsys):
    status, out = plan(capsys, "llama-3.1-405b", "--gpu", "4090", "--gpus-per-host", "2")
    assert status == 1
    assert "more than the" in out
    assert "no (p, t) of this cluster serves this workload" in out


def test_list(capsys):
    status, out = plan(capsys, "--list")
    assert status == 0
    for name in ("deepseek-v3", "qwen3-235b-a22b", "b200", "epyc-9654"):
        assert name in out


def test_model_directory_and_picture(capsys, tmp_path):
    sizes = config(layers=8, vocabulary=1000, hidden=256, heads=8, intermediate=512)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    cluster = ("--gpu", "cpu", "--gpus-per-host", "2", "--cores", "4")
    status, out = plan(capsys, str(tmp_path), *cluster)
    assert status == 0
    assert f" serve {tmp_path} -pp" in out
    assert "--gpu-memory-utilization" not in out


@pytest.mark.parametrize("rate", ["50GB/s", "400", "0.4T", "400gbit/s"])
def test_bytes_of_a_network_are_not_bits(capsys, rate):
    _, out = plan(capsys, "llama-3.1-8b", *HOSTS, "--network", rate, "--json")
    cluster = json.loads(out)["greedy"]["cluster"]
    assert cluster["network_gigabits"] == pytest.approx(400)


def test_a_cpu_is_one_device_whose_cache_gets_the_engines_share(capsys):
    kv_memory = pytest.importorskip("sipipe.engine.setup.kv_memory")
    _, out = plan(capsys, "qwen3-0.6b", "--gpu", "xeon-8468", "--memory", "64", "--json")
    found = json.loads(out)["greedy"]
    assert found["cluster"]["devices_per_host"] == 1
    (row,) = [row for row in found["choices"] if row["engine"] == "sipipe"]
    room = ((64 << 30) - row["weights_per_device"]) * kv_memory.KV_CACHE_SHARE
    assert row["kv_tokens"] == int(room // found["model"]["kv_bytes_per_token"])


ON = "llama-3.1-8b --gpu h100"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "MODEL is missing"),
        ("llama-3.1-8b", "--gpu is missing"),
        ("llama-9 --gpu h100", "did you mean llama-3.1-8b"),
        ("llama-3.1-8b --gpu h101", "--gpu: unknown device 'h101' (known: "),
        (f"{ON} --hosts 0", "--hosts"),
        (f"{ON} --tpot-slo 50", "--tpot-slo"),
        (f"{ON} --network fast", "--network"),
        (f"{ON} --input -1", "--input"),
        (f"{ON} --input 200000", "context length"),
        (f"{ON} --memory nan", "--memory"),
        (f"{ON} --memory 1e308", "--memory"),
        (f"{ON} --hosts 999999999", "from 1 to 4096"),
        (f"{ON} --weight-bits 1e-300", "--weight-bits"),
        (f"{ON} --assume efficiency.workspace_gib=1e308", "not"),
        (f"{ON} --kv-cache-dtype int2", "--kv-cache-dtype"),
        (f"{ON} --baseline none", "--baseline: unknown engine 'none' (known: "),
        (f"{ON} --samplers 1000", "--samplers 1000: a host of 96 cores has 86 left"),
        (f"{ON} --sampling greedy,beam", "--sampling: unknown sampling 'beam' (known: "),
        (f"{ON} --assume loop.unevn=1", "did you mean loop.uneven"),
        (f"{ON} --assume loop.uneven=x", "loop.uneven: must be"),
        (f"{ON} --assume efficiency.memory=0", "above 0, not"),
        (f"{ON} --gpu-memory-utilization 2", "--gpu-memory-util"),
        ("/no/config.json --gpu h100", "cannot read /no/config.json"),
    ],
)
def test_a_mistake_gets_one_line(capsys, arguments, named):
    assert main(["plan", *arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert named in error
