"""Scripts, which are no modules of ours, as modules, and what commands print."""

import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path


def load(*path: str):
    """A file of this tree, imported anew."""
    file = Path(__file__).parents[1].joinpath(*path)
    loader = SourceFileLoader(file.stem, str(file))
    module = module_from_spec(spec_from_loader(file.stem, loader))
    loader.exec_module(module)
    return module


def ran(command, **more) -> subprocess.CompletedProcess[str]:
    """A command that has ended: its status, and all that it printed, of both kinds in order."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, text=True, check=False, **both, **more)
