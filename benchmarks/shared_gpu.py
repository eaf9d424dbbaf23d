"""Lets stock vLLM run several stages on one GPU (``--worker-extension-cls``), which it refuses.

Its ranks are each mapped to the first GPU, and NCCL, which takes no GPU twice on a host, is told
that each is a host of its own. So hidden states and tokens go by sockets of the loopback, which is
slower than NVLink. Under MPS alone: NCCL's kernels wait for each other.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker import gpu_worker

os.environ["NCCL_HOSTID"] = f"{os.getpid()}"
os.environ |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none"}

_init_device = gpu_worker.Worker.init_device


def _on_the_first(worker: Any) -> None:
    parallel = worker.parallel_config
    parallel.assigned_physical_gpu_ids = [0] * parallel.world_size
    _init_device(worker)


gpu_worker.Worker.init_device = _on_the_first


class SharedGPU:
    """Adds nothing: importing this module has done it."""
