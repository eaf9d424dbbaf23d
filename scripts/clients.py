"""Makes a Python that has LangChain, litellm, lm_eval and GuideLLM, for tests that compare answers.

They cannot be in .venv: they ask for other versions than the engine does. Their environment has what
requirements/clients.lock names, and behind that .venv's packages: torch, which GuideLLM imports, is
taken from there and not downloaded again. It is made once, and named by a hash of what it is made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "clients.lock"
SECONDS = 300
"""For the download: some 170 MB."""


class UnavailableError(Exception):
    """Why there is no such Python, in one line."""


def make() -> Path:
    """The Python of the clients' environment; made, and its packages downloaded, where it is missing.

    Raises:
        UnavailableError: the package index does not answer in time.
    """
    behind = sysconfig.get_path("purelib")
    digest = hashlib.sha256(LOCK.read_bytes() + Path(__file__).read_bytes() + behind.encode())
    folder = ROOT / "build" / f"clients-{digest.hexdigest()[:12]}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "clients.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes at a time: the second one waits
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                _fill(Path(unfinished), behind)
                Path(unfinished).rename(folder)
                Path(unfinished).mkdir()  # for the clean-up
    return folder / "bin" / "python"


def _fill(folder: Path, behind: str) -> None:
    """Make the environment in ``folder``, with .venv's packages in ``behind`` after its own."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    options, variables = setup_script().as_uv_has_it(sys.executable)
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    command += [*options, "--no-deps", f"--requirement={LOCK}"]
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{LOCK.name} took more than {SECONDS} s to install") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise UnavailableError(f"{LOCK.name} cannot be installed: {reason[-1].strip()}")
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file puts it at the end of sys.path, and runs no path files that are in there: SiPipe itself,
    # which is installed by one, stays out.
    (packages / "behind.pth").write_text(f"{behind}\n")


def setup_script() -> ModuleType:
    """scripts/setup, which knows what pip is told of indexes, in uv's words."""
    loader = SourceFileLoader("setup", str(ROOT / "scripts" / "setup"))
    module = module_from_spec(spec_from_loader("setup", loader))
    loader.exec_module(module)
    return module
