"""Triton on the CPU build, in its interpreter: a backend that is there and compiles nothing.

vLLM asks Triton for an active one, which the wheel has for GPUs only. Python imports this file by
itself where its directory is on ``PYTHONPATH``.
"""

import importlib.util
import sys


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class Finder:
    """Finds ``triton.backends``, and changes its list once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module) -> None:
            load(module)
            module.backends.clear()
            module.backends["cpu"] = module.Backend(compiler=None, driver=Driver)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
