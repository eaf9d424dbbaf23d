"""Scripts, which are no modules of ours, as modules."""

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
