"""Two stages on one GPU give stock vLLM's tokens, and no step waits for the device.

Never run where this was written: no GPU there.
"""

import pytest
from tests.engine import test_parity as parity
from tests.engine.engines import assert_stock, model, run_engine

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("drawing", ["on", "auto"])
def test_no_step_waits_for_the_device(models, drawing):
    """vLLM's and torch's check makes an error of every wait of a launching thread."""
    path, batches = model(models), parity.mixed_batches()
    found = run_engine(
        path,
        batches,
        sipipe={"samplers": 2, "devices": [0, 0], "cpu_sampling": drawing},
        env={"VLLM_GPU_SYNC_CHECK": "error"},
        pipeline_parallel_size=2,
        gpu_memory_utilization=0.45,
    )
    assert_stock(found, path, batches, parity.same_tokens)
