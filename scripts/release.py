"""Is this tree ready to be released? Run by `make release`, after lint and all tests.

Builds the source distribution, builds the wheel from that, installs it into a fresh environment
without vLLM and without torch, and uses it there. Both are then in ``dist``. Uploading is left to a
person.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CHECKER = "twine==7.0.0"
DRAW = """
import sys
import numpy as np
from sipipe.sampling import SequenceParams, sample
tokens = sample(np.eye(4, 100, dtype=np.float32) * 90, [SequenceParams(temperature=0.0)] * 4)
assert not {"torch", "vllm"} & set(sys.modules), "sampling imported torch or vLLM"
print("sampling alone:", tokens)
"""


def main() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/sipipe/_version.py").read_text())
    assert version is not None
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    wanted = {name for name in tracked if not name.startswith((".ci", ".git"))}
    check_tree(version[1])
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST), cwd=ROOT)
        with tarfile.open(next(DIST.glob("*.tar.gz"))) as archive:
            files = {member.split("/", 1)[-1] for member in archive.getnames()}
            archive.extractall(folder / "source", filter="data")
        check("the source distribution is complete", wanted <= files)
        others = {name for name in files - wanted if not any(w.startswith(name) for w in wanted)}
        check("and has nothing else", others <= {"PKG-INFO", ".gitignore"})
        source = next((folder / "source").iterdir())
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(DIST), cwd=source)
        wheel = next(DIST.glob("*.whl"))
        code = {name.removeprefix("src/") for name in wanted if name.startswith("src/")}
        check("the wheel is complete", code <= set(zipfile.ZipFile(wheel).namelist()))
        check("the package index takes both", accepted(folder, wheel))
        venv.create(folder / "venv", with_pip=True)
        binaries = folder / "venv" / "bin"
        run(str(binaries / "pip"), "install", "--quiet", str(wheel), cwd=folder)
        print(run(str(binaries / "sipipe"), "--version", cwd=folder))
        print(run(str(binaries / "python"), "-c", DRAW, cwd=folder))
        told = subprocess.run(
            [binaries / "sipipe", "doctor"], cwd=folder, capture_output=True, text=True, check=False
        )
        missing = told.returncode == 1 and "not installed" in told.stdout and not told.stderr
        check("sipipe doctor names what is missing", missing)
    if FAILED:
        sys.exit(f"release: not ready: {', '.join(FAILED)}")
    print(
        f"release: {version[1]} is ready: tag it v{version[1]}, and upload what is in {DIST.name}"
    )


def accepted(folder: Path, wheel: Path) -> bool:
    """Whether metadata and README are as the package index wants them, by its own checker."""
    venv.create(folder / "checker", with_pip=True)
    binaries = folder / "checker" / "bin"
    run(str(binaries / "pip"), "install", "--quiet", CHECKER, cwd=folder)
    built = [str(wheel), *map(str, DIST.glob("*.tar.gz"))]
    command = [str(binaries / "twine"), "check", "--strict", *built]
    return not subprocess.run(command, cwd=folder, check=False).returncode


def check_tree(version: str) -> None:
    """Its change log, its state, and that its figures can be measured."""
    newest = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    check("CHANGELOG.md begins with this version", newest is not None and newest[1] == version)
    dated = newest is not None and re.fullmatch(r" \(\d{4}-\d\d-\d\d\)", newest[2]) is not None
    check("CHANGELOG.md gives its date", dated)
    clean = run("git", "status", "--porcelain", cwd=ROOT) == ""
    check("the tree is committed", clean)
    if not clean:  # nobody would know of what code the figures are, after five hours
        return
    # It names figures that left their ranges: a person reads them, since better ones differ too.
    command = (sys.executable, "-m", "benchmarks.campaign", "--compare")
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    check("every benchmark of the campaign measured its figures", not status)


FAILED: list[str] = []


def check(what: str, holds: bool) -> None:
    print(f"{'ok' if holds else 'no'}  {what}")
    if not holds:
        FAILED.append(what)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"release: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
