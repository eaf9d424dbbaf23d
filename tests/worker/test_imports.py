"""What a worker's process must not have loaded when vLLM sets itself up; each in a new process."""

import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


def loaded_after(statement: str, names: list[str]) -> list[str]:
    code = f"import gc, sys\ngc.disable()\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return run.stdout.strip().splitlines()[-1].split() if run.stdout.strip() else []


def test_the_process_starts_without_numba():
    """vLLM's CPU worker scans all loaded modules and stumbles over llvmlite."""
    assert loaded_after("import sipipe.worker.main", ["llvmlite", "numba"]) == []


def test_a_gpu_worker_does_not_replace_torchs_cuda_functions():
    """Which importing vLLM's CPU worker does, in the whole process."""
    statement = (
        "from vllm import platforms\n"
        "platforms.current_platform.is_cpu = lambda: False\n"
        "import torch\n"
        "before = torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream\n"
        "from sipipe.worker import vllm_workers\n"
        "assert before == (torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream)\n"
        "assert not hasattr(vllm_workers, 'CPUStageWorker')"
    )
    assert loaded_after(statement, ["vllm.v1.worker.cpu_worker"]) == []
