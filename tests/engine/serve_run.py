"""``sipipe serve`` or ``vllm serve`` with vLLM imported: ``serve_run.py MODULE serve ARGUMENTS``."""

import os
import runpy
import sys

sys.path.append(os.path.dirname(__file__))
from forked_children import start_by_fork

start_by_fork()
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Here and in the engine's own process, as in ``engine_run.py``.
    from sipipe.engine.setup import compatibility

    compatibility.HAS_TRITON = True

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
