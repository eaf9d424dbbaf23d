"""Tensors on the emulated device, and what makes torch believe that it has two GPUs."""

from __future__ import annotations

import ast
import ctypes
import inspect
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from vllm.utils import torch_utils
from vllm.v1.worker.gpu import buffer_utils

from sipipe.ipc.link import cuda_device
from sipipe.worker import device as device_module

from .emulated_cuda import (
    HOST_TENSOR,
    PAGEABLE,
    Block,
    Event,
    Machine,
    SteppedQueue,
    Stream,
    poison,
)

aten = torch.ops.aten
_FACTORIES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.randn,
    torch.full,
    torch.arange,
    torch.tensor,
}
# The name is torch's, and has no underscore-free twin.
_to_copy = aten._to_copy.default  # noqa: SLF001
_COPIES = {_to_copy, aten.to.dtype_layout, aten.to.device, aten.to.dtype}


class DeviceTensor(torch.Tensor):
    """To torch's C++ parts a tensor without memory, to Python one on ``cuda:index``."""

    memory: torch.Tensor
    block: Block | None
    """What it lies in; None: nobody gives it back."""
    index: int

    is_cuda = True
    is_cpu = False

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: Any, index: int) -> DeviceTensor:
        with torch.inference_mode(False):  # views are taken inside and outside of it
            # torch's documented door for tensors of another's, in spite of its name
            found = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
                cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device="meta"
            )
        found.memory, found.block, found.index = memory, block, index
        return found

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        if self.block is not None:
            self.block.streams.add(stream)

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.index})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, dict(kwargs or {}))


def new(like: torch.Tensor, index: int) -> DeviceTensor:
    """Memory that holds poison, of the shape, strides and type of ``like``."""
    memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    poison(memory)
    return DeviceTensor(memory, Block(Machine.current.stream_of(index), memory), index)


def copy(target: torch.Tensor, source: torch.Tensor, *, waits: bool = True) -> None:
    """In a device, or between one and the host; the host waits where its memory is pageable, unless
    it need not (``waits``) and the driver can keep the source for it."""
    machine = Machine.current
    on_device, other = target, source
    if not isinstance(target, DeviceTensor):
        on_device, other = source, target
    assert isinstance(on_device, DeviceTensor)
    there, here = (getattr(tensor, "memory", tensor) for tensor in (target, source))
    staged = not waits and other is source and not machine.is_locked(source)
    if staged:
        here = source.clone()
    machine.copies += 1
    place = machine.put(machine.stream_of(on_device.index), lambda: there.copy_(here))
    if not isinstance(other, DeviceTensor) and not staged and not machine.is_locked(other):
        machine.wait(PAGEABLE, place)


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator with a device's tensors among its arguments."""
    machine = Machine.current
    leaves = pytree.tree_leaves((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, DeviceTensor))
    if func is aten.copy_.default:
        copy(args[0], args[1], waits=not (args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        return args[0]
    if func in _COPIES:
        device = kwargs.pop("device", None)
        if device is not None and device.type == "cpu":
            target = torch.empty(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if kwargs.get("non_blocking"):  # as torch, which takes page-locked memory then
                machine.lock_pages(target.data_ptr(), target.nbytes)
            copy(target, first)
            return target
    if func is aten.contiguous.default:
        if first.memory.is_contiguous():
            return first
        func, kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}
    there, names = pytree.tree_map_only(DeviceTensor, lambda t: t.memory, (args, kwargs))
    if func.is_view and func not in _COPIES:
        return pytree.tree_map_only(
            torch.Tensor,
            lambda view: DeviceTensor(view, first.block, first.index),
            func(*there, **names),
        )
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim():
            machine.wait(HOST_TENSOR, (machine.stream_of(first.index), 0))
    # torch says nowhere else whether an operator writes to its arguments
    if func._schema.is_mutable:  # noqa: SLF001
        machine.launch(lambda: func(*there, **names), first.index)
        return args[0]
    shapes = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (there, names))
    found = func(*shapes[0], **shapes[1])
    results = pytree.tree_map_only(torch.Tensor, lambda shape: new(shape, first.index), found)
    targets = [tensor.memory for tensor in pytree.tree_leaves(results)]

    def kernel() -> None:
        sources = pytree.tree_leaves(func(*there, **names))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    machine.launch(kernel, first.index)
    return results


class Factories(TorchFunctionMode):
    """``torch.zeros(..., device="cuda")`` and its like, which torch's CPU build refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = Machine.current, dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            return Driver.memory[args[0].address.value]
        if func in _FACTORIES:
            locked = kwargs.pop("pin_memory", False)
            on_device = device is not None and torch.device(device).type == "cuda"
            if on_device:
                kwargs.pop("device")
            found = func(*args, **kwargs)
            if locked:
                machine.lock_pages(found.data_ptr(), found.nbytes)
            if not on_device:
                return found
            target = new(found, machine.index_of(device))
            if func is not torch.empty:
                machine.launch(lambda: target.memory.copy_(found), target.index)
            return target
        if func is torch.Tensor.to and not isinstance(args[0], DeviceTensor):
            device = device if device is not None else next(iter(args[1:]), None)
            is_type = isinstance(device, torch.dtype | torch.Tensor)
            if device is not None and not is_type and torch.device(device).type == "cuda":
                source = args[0].to(kwargs["dtype"]) if kwargs.get("dtype") else args[0]
                target = new(source, machine.index_of(device))
                copy(target, source, waits=not kwargs.get("non_blocking"))
                return target
        return func(*args, **kwargs)


class FactoriesThread(threading.Thread):
    """A thread of the code under test, in which :class:`Factories` is entered: torch's modes are of one
    thread."""

    def run(self) -> None:
        with Factories():
            super().run()


def pointed(reference: Any) -> Any:
    """What ``ctypes.byref`` refers to."""
    # A real driver finds it by its address; ctypes has no other way for Python.
    return reference._obj  # noqa: SLF001


class CopiedMatrix(ctypes.Structure):
    """``CUDA_MEMCPY2D`` as ``cuda.h`` has it."""

    _fields_ = (
        *(
            (f"{end}_{name}", kind)
            for end in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t),
                ("y", ctypes.c_size_t),
                ("type", ctypes.c_int),
                ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Driver:
    """``libcuda``: the functions that links between GPUs call."""

    memory: ClassVar[dict[int, DeviceTensor]] = {}
    """What was allocated, by address; until the next machine is installed."""

    def cuMemAlloc_v2(self, address: Any, nbytes: Any) -> int:
        memory = torch.empty(nbytes.value, dtype=torch.uint8)
        poison(memory)
        tensor = DeviceTensor(memory, None, Machine.current.device)
        self.memory[memory.data_ptr()] = tensor
        pointed(address).value = memory.data_ptr()
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        ctypes.memmove(handle, address.value.to_bytes(8, "little"), 8)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _: Any) -> int:
        pointed(address).value = int.from_bytes(bytes(handle)[:8], "little")
        return 0

    def cuMemcpyAsync(self, to: Any, source: Any, nbytes: Any, stream: Any) -> int:
        Machine.current.put(
            Machine.current.streams[stream.value - 1],
            lambda: ctypes.memmove(to.value, source.value, nbytes.value),
        )
        return 0

    def cuMemcpy2DAsync_v2(self, matrices: Any, stream: Any) -> int:
        machine = Machine.current
        of = CopiedMatrix.from_buffer(pointed(matrices))
        assert (of.source_type, of.target_type) == (2, 1), "from a device to the host"

        def copy() -> None:
            for row in range(of.height):
                there = of.target_host + row * of.target_pitch
                ctypes.memmove(there, of.source_device + row * of.source_pitch, of.width)

        machine.copies += 1
        place = machine.put(machine.streams[stream.value - 1], copy)
        if not machine.is_locked_at(of.target_host):
            machine.wait(PAGEABLE, place)
        return 0

    def nothing(self, *_: Any) -> int:
        return 0

    cuCtxGetCurrent = cuCtxSetCurrent = cuMemFree_v2 = cuIpcCloseMemHandle = nothing


class UvaBuffer:
    """As vLLM's: page-locked memory that kernels read in place, when they run."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        machine = Machine.current
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        machine.lock_pages(self.cpu.data_ptr(), self.cpu.nbytes)
        self._uva = DeviceTensor(self.cpu, None, machine.device)

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self._uva[:n]


def vllm_async_tensor_h2d() -> Any:
    """vLLM's function as on a GPU: importing its CPU worker puts another one in its place."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(torch_utils.np_to_pinned_tensor)))
    tree.body = [n for n in tree.body if getattr(n, "name", "") == "async_tensor_h2d"]
    names = {"torch": torch, "np": np, "is_pin_memory_available": lambda: True, "PIN_MEMORY": True}
    exec(compile(tree, "async_tensor_h2d", "exec"), names)
    return names["async_tensor_h2d"]


def install(monkeypatch: Any, seed: int, gpus: int = 2) -> Machine:
    """From now on torch has so many GPUs; :class:`Factories` is to be entered besides."""
    machine = Machine(seed, gpus)
    Driver.memory.clear()
    cuda = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": machine.stream_of,
        "set_stream": machine.set_stream,
        "set_device": machine.set_device,
        "stream": machine.within,
        "device": nullcontext,
        "current_device": lambda: machine.device,
        "device_count": lambda: gpus,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"gpu-{index}"),
        "can_device_access_peer": lambda *_: True,
        "set_sync_debug_mode": lambda _: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda start, nbytes, _: machine.lock_pages(start, nbytes) or 0,
            cudaHostUnregister=lambda start: machine.unlock_pages(start) or 0,
        ),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: machine.is_locked(tensor))
    monkeypatch.setattr(torch_utils, "async_tensor_h2d", vllm_async_tensor_h2d())
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    names = {**vars(ctypes), "CDLL": lambda _: Driver()}
    monkeypatch.setattr(cuda_device, "ctypes", SimpleNamespace(**names))
    monkeypatch.setattr(device_module, "queue", SimpleNamespace(SimpleQueue=SteppedQueue))
    return machine
