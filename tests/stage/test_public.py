"""What the package exports, and that it needs neither vLLM, torch nor Numba to import."""

import subprocess
import sys

import sipipe.stage


def test_exports_are_sorted_and_there():
    assert sipipe.stage.__all__ == sorted(sipipe.stage.__all__)
    for name in sipipe.stage.__all__:
        assert getattr(sipipe.stage, name).__doc__


def test_importing_the_package_imports_no_heavy_module():
    code = (
        "import sys, sipipe.stage; "
        "print([m for m in ('vllm', 'torch', 'numba', 'llvmlite') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
