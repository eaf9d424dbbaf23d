"""An engine whose stages are emulated, measured: :mod:`benchmarks.measure` with other workers.

vLLM's engine process is spawned, and so imports this module again, as its parent's main one: the
worker class is named there too. ``EMULATED_PROFILE`` is where the workers find their profile.
"""

from __future__ import annotations

from benchmarks.measure import Job, measure
from sipipe.engine.setup import compatibility, decide
from sipipe.engine.setup.compatibility import STOCK_WORKERS
from sipipe.tools.child import answer

compatibility.device_may_draw = lambda: True  # its sampler is emulated too
decide.share_kv_memory = lambda *_: None  # there is no cache
STOCK_WORKERS.update(dict.fromkeys(STOCK_WORKERS, "benchmarks.emulation.worker.EmulatedWorker"))

if __name__ == "__main__":
    answer(lambda job: measure(Job(**job)))
