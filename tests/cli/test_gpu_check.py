"""``sipipe gpu-check`` where there is no GPU: what needs none runs, the rest is skipped by name."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from benchmarks.make_model.checkpoint import make_model  # noqa: E402
from tests.ipc.link.conftest import HERE, free_port  # noqa: E402

from sipipe import cli  # noqa: E402
from sipipe.cli import gpu_check  # noqa: E402
from sipipe.errors import SiPipeError  # noqa: E402
from sipipe.tools import link_trials  # noqa: E402
from sipipe.tools.load import SAMPLING, Job  # noqa: E402

INPUT = "--random-input-len"
SERVERS = {name: step for name, step in gpu_check.STEPS.items() if "load" in step}
KEYS = {"gpus", "load", "row", "pp", "tp", "draw", "plain", "like", "trace", "small", "links"}


def check(tmp_path, steps, *more):
    """The status, and the lines of the file."""
    out = tmp_path / "found.jsonl"
    status = cli.main(["gpu-check", "--out", str(out), "--steps", steps, *more])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Returns the job that a step's process gets on a machine with so many GPUs, and None where the step
    is skipped."""
    monkeypatch.setattr(gpu_check, "output", lambda *_: "{}")

    def job_of(name, gpus, *more):
        jobs = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(
            gpu_check, "measured", lambda _, job, *__, **___: jobs.append(job) or {"runs": {}}
        )
        (line,) = check(tmp_path, name, "M", "--without-gpu", *more)[1][-1:]
        assert ("skipped" in line) is not jobs
        return jobs[0] if jobs else None

    return job_of


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["gpu-check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sipipe: no CUDA device is visible")
    assert said.count("\n") == 1


def test_a_step_that_is_not_there_is_named(capsys):
    assert cli.main(["gpu-check", "--steps", "versions,three"]) == 2
    assert '--steps "three" is none of versions, links, stock' in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_a_pipe_is_no_file_to_append_to(tmp_path, capsys):
    """Its lines are read before the first step, from whoever writes it: this process."""
    out = str(tmp_path / "pipe")
    os.mkfifo(out)
    assert cli.main(["gpu-check", "--without-gpu", "--steps", "versions", "--out", out]) == 2
    assert capsys.readouterr().err == f'sipipe: gpu-check: --out "{out}" is no regular file\n'


@pytest.mark.parametrize("out", ["missing/found.jsonl", "other.txt", "numbers.jsonl"])
def test_a_file_that_cannot_be_appended_to_is_said_before_any_step(tmp_path, capsys, out):
    (tmp_path / "other.txt").write_text("notes")
    (tmp_path / "numbers.jsonl").write_text("5\n")
    argv = ["gpu-check", "--without-gpu", "--steps", "versions", "--out", str(tmp_path / out)]
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f'sipipe: gpu-check: --out "{tmp_path / out}" cannot be appended')
    assert (said.err.count("\n"), said.out) == (1, "")


def test_versions_are_told_without_a_gpu(tmp_path):
    [versions] = check(tmp_path, "versions", "--without-gpu")[1]
    assert "failed" not in versions, versions
    assert versions["found"]["numba"]
    assert versions["found"]["torch"]
    assert {finding["what"] for finding in versions["doctor"]} > {"vLLM", "cores", "core plan"}


def test_the_table_is_sound():
    seen = []
    for name, step in gpu_check.STEPS.items():
        assert set(step) <= KEYS, name
        assert step.get("like") in (None, *seen), f"{name} is compared with what comes later"
        seen.append(name)
    assert set(gpu_check.TABLE) == {"load", "steps"}
    for load in gpu_check.TABLE["load"].values():
        for sent in (load, load.get("small", load)):
            assert {way for way, *_ in sent["loads"]} <= set(SAMPLING)


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("name", SERVERS)
def test_every_server_can_be_started(job_of, name, gpus):
    step = SERVERS[name]
    asked = job_of(name, gpus)
    if asked is None:
        assert gpus < step["gpus"]
        return
    job = Job(**asked)
    stock = step["row"].startswith("stock")
    assert ("vllm.entrypoints.cli.main" in job.command) is stock
    words = dict(zip(job.command, job.command[1:], strict=False))
    p, t = int(words["-pp"]), int(words["-tp"])
    assert (p, t) == (step.get("pp", max(1, gpus)), step.get("tp", 1))
    if not stock:
        settings = json.loads(words["--additional-config"])["sipipe"]
        asked = step.get("draw", "auto")
        assert settings == {} if "plain" in step else settings["cpu_sampling"] == asked
        assert ("devices" in settings) is (0 < gpus < p * t)
        assert ("--trace" in words) is ("trace" in step)
    assert ("VLLM_GPU_SYNC_CHECK" in job.env) is ("like" in step)
    if "--hf-overrides" in words:
        assert json.loads(words["--hf-overrides"])


@pytest.mark.parametrize("name", SERVERS)
def test_vllm_takes_the_options(job_of, name):
    pytest.importorskip("vllm")
    from sipipe.engine.start.arguments import parse_engine_args

    job = job_of(name, 8, "--pp", "2")
    words = job["command"][job["command"].index("serve") + 1 :]
    if "--trace" in words:
        place = words.index("--trace")
        del words[place : place + 2]
    assert parse_engine_args(words, {})


def test_a_failed_step_has_its_log_and_other_tokens_are_a_failure(tmp_path, monkeypatch):
    def answers(tokens):
        return {"answers": [[tokens]] * 16, "draws": {"p": fit}}

    def measured(name, *_, **__):
        if name == "two":
            error = SiPipeError("two failed: no memory")
            error.add_note("the last lines of its log")
            raise error
        return answers({"stock": 5, "one": 5, "two-off": 7}[name])

    fit = 0.5
    monkeypatch.setattr(gpu_check, "measured", measured)
    status, lines = check(tmp_path, "stock,one,two,two-off", "--without-gpu")
    assert status == 1
    stock, one, two, off = lines
    assert "failed" not in stock | one
    assert (two["failed"], two["log"]) == ("two failed: no memory", "the last lines of its log")
    assert off["failed"] == "greedy tokens are not those of stock"
    status, lines = check(tmp_path, "one", "--without-gpu")
    assert (status, len(lines)) == (0, 5), "appended, and compared with an earlier call's"
    fit = 1e-9
    status, lines = check(tmp_path, "one", "--without-gpu")
    assert (status, "drawn does not fit" in lines[-1]["failed"]) == (1, True)


def test_answers_are_compared_with_those_of_the_same_model_that_were_told(tmp_path, monkeypatch):
    def told(step, model, answers):
        """The status, and what the answers were compared with."""
        found = {"answers": answers, "draws": None}
        monkeypatch.setattr(gpu_check, "measured", lambda *_, **__: dict(found))
        status, lines = check(tmp_path, step, "--without-gpu", model)
        return status, lines[-1].get("compared with")

    assert told("stock", "other", [[5]])[0] == 0
    assert told("one", "model", [[7]]) == (0, "nothing"), "stock ran another model"
    assert told("stock", "model", None)[0] == 0
    assert told("one", "model", [[7]]) == (0, "nothing"), "stock's were refused"
    assert told("stock", "model", [[7]])[0] == 0
    assert told("one", "model", [[8]]) == (1, "stock")


def test_a_load_without_answers_is_a_finding(tmp_path, monkeypatch):
    """As of the large model, which is asked for none."""
    monkeypatch.setitem(gpu_check.STEPS, "minute", {"load": "minute", "row": ""})
    monkeypatch.setattr(gpu_check, "measured", lambda *_, **__: {"runs": {}})
    status, (line,) = check(tmp_path, "minute", "--without-gpu")
    assert (status, line["found"]) == (0, {"runs": {}})


def test_stages_are_beside_as_many_of_stocks_with_long_prompts_and_open_arrivals(job_of):
    for count in (2, 4, 8):
        ours = job_of(f"stages-{count}", 8)
        stocks = job_of(f"stages-{count}-stock", 8)
        sent = ours["load"] + ours["loads"]
        assert sent == stocks["load"] + stocks["loads"]
        lengths = [word for word, before in zip(sent[1:], sent, strict=False) if before == INPUT]
        assert lengths[-1] == "512", "the last one holds"
        assert {bool(rate) for *_, rate in ours["loads"]} == {False, True}
        assert gpu_check.STEPS[f"stages-{count}"]["gpus"] == count


@pytest.mark.ci
def test_links_are_tried_without_a_gpu_too(tmp_path):
    status, (line,) = check(tmp_path, "links", "--without-gpu")
    assert status == 0, line
    found = line["found"]
    assert found["buffer"] == 512 * 4096 * 2 * 2
    assert {pair: set(kinds) for pair, kinds in found["links"].items()} == {
        "0-1": {"shm"},
        "1-0": {"shm"},
    }
    for kinds in found["links"].values():
        assert kinds["shm"]["passed"]
        assert kinds["shm"]["ms"] > 0


def test_a_pair_that_no_transport_joins_is_a_failure(tmp_path, monkeypatch):
    refused = {"failed": "CUDA refuses it", "hangs": False}
    passed = {"passed": True, "ms": 0.5}
    links = {
        "0-1": {"cuda_ipc": refused, "shm": refused},
        "1-0": {"cuda_ipc": refused, "shm": passed},
    }
    monkeypatch.setattr(gpu_check, "measured", lambda *_, **__: {"links": links})
    status, (line,) = check(tmp_path, "links", "--without-gpu")
    assert (status, line["failed"]) == (1, "no transport joins 0-1")
    assert line["found"]["links"] == links


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], "--nnodes needs --steps links"),
        (["--steps", "links", "--nnodes", "3"], "--nnodes is 2 at most"),
        (["--steps", "links", "--nnodes", "2"], "--nnodes 2 needs --master-addr"),
    ],
)
def test_two_hosts_are_for_links_and_need_an_address(capsys, options, says):
    assert cli.main(["gpu-check", "--without-gpu", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.ci
def test_links_between_two_hosts_are_tried_from_both(monkeypatch):
    """In two threads here, on loopback."""
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    monkeypatch.setattr(link_trials, "nixl_reach", lambda: "")
    port = free_port(HERE)

    def end(rank):
        return link_trials.run(link_trials.Job(nnodes=2, node_rank=rank, address=HERE, port=port))

    with ThreadPoolExecutor(2) as pool:
        receives, sends = pool.map(end, range(2))
    assert receives["links"] == {"host 1-0": {"zeromq": {"passed": True}}}
    assert sends["links"]["host 1-0"]["zeromq"]["ms"] > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_runs_through_without_a_gpu(tmp_path, models):
    """Engines with one and two stages, by CPU samplers and vLLM's, beside stock."""
    path = make_model("llama", models / "checked")
    status, lines = check(tmp_path, ",".join(gpu_check.STEPS), "--without-gpu", str(path))
    assert status == 0, [line for line in lines if "failed" in line]
    ran = {line["step"]: line["found"] for line in lines if "found" in line}
    small = {"stock", "one", "one-plain", "two", "two-off"}
    arrivals = {"stages-2"}  # two stages of stock's on CPUs end under this load
    assert set(ran) == {"versions", "links"} | small | arrivals
    skipped = {line["skipped"] for line in lines if line["step"] not in ran}
    assert skipped == {"no CUDA"}
    for name in arrivals:
        assert set(ran[name]["runs"]) == {"chat 8", "chat 6 rate=4.0"}
    for name in small:
        assert len(ran[name]["answers"]) == 16
        assert set(ran[name]["runs"]) == {"greedy 16", "all 16"}
