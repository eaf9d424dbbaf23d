"""Instructions of this machine's CPUs for bfloat16 and float16, the dtypes of most models."""

from __future__ import annotations

import platform
from pathlib import Path

HINT = (
    "this CPU has no AVX-512: bfloat16 and float16 take several times as long as --dtype float32, "
    "which needs twice the memory"
)
_QUICK = {"avx512bw", "avx_ne_convert", "amx_bf16"}


def slow(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say if bfloat16 and float16 are slow here: x86 without AVX-512.

    oneDNN, by which vLLM's CPU build multiplies, then has only its slow way for them. False where it is
    not known.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "")
    return bool(flags) and not _QUICK & set(flags.split())
