"""Slices of GPUs (MIG), by the names that the user gives in ``CUDA_VISIBLE_DEVICES``.

CUDA shows a process one slice at most, the first that the variable names. So a host has as many
devices as there are names, each worker gets a variable of its own with one of them, and a number such
as ``cuda:0`` says nothing outside of its process. Slices cannot map one another's memory, also those
of one GPU: links between them go by host memory.

Rejected: a variable of its own for every worker, also on whole GPUs, because a process can map the
memory of a GPU only if it sees it, which links by ``cuda_ipc`` and vLLM's all-reduce rely on.

Untested on a GPU (docs/gpu.md).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from sipipe.extending import extends

VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_slice(name: str) -> bool:
    """Say if a name of a device is a slice's."""
    return name.startswith("MIG-")


def named_slices(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Names of the slices that the variable shows, each once, in its order; none where it names whole
    GPUs, or is not set. As CUDA does, it ends at the first name of something else.

    Args:
        environment: variables to look at; None: this process's.
    """
    variables = os.environ if environment is None else environment
    names = [name.strip() for name in variables.get(VISIBLE, "").split(",")]
    return tuple(dict.fromkeys(takewhile(is_slice, names)))


def slice_for_worker(number: int, devices: Sequence[int] | None) -> dict[str, str]:
    """Environment that a worker has of its own: the variable with its slice; nothing where GPUs are
    whole, or the engine runs on CPUs.

    Args:
        number: the worker's number on this host, over all replicas.
        devices: a number in the variable for each worker; None on CPUs.
    """
    names = named_slices()
    return {VISIBLE: names[devices[number]]} if names and devices is not None else {}


def find_gpus_of_slices(platform: Any, import_nvml: Callable[[], Any]) -> None:
    """Have vLLM's CUDA ``platform`` take a slice for the GPU that it is of, from now on in this
    process, where the variable names slices. vLLM asks NVML for the number of a GPU by that name, and
    for a slice gets its number within its GPU, which is another GPU's or none's.

    Args:
        platform: vLLM's ``current_platform``.
        import_nvml: returns vLLM's ``pynvml``.
    """
    if not named_slices():
        return
    kind = type(platform)

    @extends(kind, "device_control_id_to_physical_device_id")
    def physical_gpu(number_of: Any, cls: type, device_id: str) -> int:
        if not is_slice(device_id.strip()):
            return int(number_of(cls, device_id))
        nvml = import_nvml()
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(device_id.strip())
            gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return int(nvml.nvmlDeviceGetIndex(gpu))
        finally:
            nvml.nvmlShutdown()
