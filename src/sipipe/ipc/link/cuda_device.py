"""The CUDA device of a link between GPUs: memory, events and copies, by the driver and by torch.

It has run on one GPU, between two processes, **never between GPUs** (docs/gpu.md). Everything else
is tested with a stand-in that keeps CUDA's order: copies happen later, in a stream.

Memory that another process maps comes from the driver (``cuMemAlloc``), not from torch's
allocator, whose blocks share an allocation and, with expandable segments, cannot be exported.
The driver is called with :mod:`ctypes`, which leaves the GIL; events and streams are torch's.
"""

import ctypes
from typing import Any

import torch

from sipipe.errors import ResourceError, UnsupportedError
from sipipe.gpu_slices import named_slices

_IPC_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST = 1  # CUmemorytype
_DEVICE = 2


class CudaDriver:
    """The CUDA driver, for the calling thread's current device. ``copies`` is the stream of all
    copies."""

    def __init__(self, copies: Any) -> None:
        self._index = torch.cuda.current_device()
        self.copies = copies
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        copies.query()  # makes the context this thread's current one
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a matrix from the device to page-locked host memory, in one copy whatever lies between
        its rows. Both have one dtype and contiguous rows, and the caller keeps them until the copy is
        done."""
        assert source.dtype == target.dtype
        assert source.stride(1) == target.stride(1) == 1
        size = source.element_size()
        rows, columns = source.shape
        # The fields of a CUDA_MEMCPY2D. For each side: x, y, the kind of memory, its address if it is a
        # host's, a device's or an array's, and the bytes from row to row.
        source_side = (0, 0, _DEVICE, 0, source.data_ptr(), 0, source.stride(0) * size)
        target_side = (0, 0, _HOST, target.data_ptr(), 0, 0, target.stride(0) * size)
        fields = (ctypes.c_uint64 * 16)(*source_side, *target_side, columns * size, rows)
        stream = ctypes.c_void_p(self.copies.cuda_stream)
        self._driver_call("cuMemcpy2DAsync_v2", ctypes.byref(fields), stream)

    def _driver_call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver in the device's context. Raises ResourceError: it fails."""
        self._call("cuCtxSetCurrent", self._context)  # a thread of SiPipe's has no context yet
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise ResourceError(
                f"CUDA: {name} on cuda:{self._index} failed: "
                f"{(text.value or b'unknown error').decode()} ({error})"
            )


class CudaDevice(CudaDriver):
    """The device of a link between GPUs. Only :meth:`unmap` waits for it."""

    def __init__(self) -> None:
        super().__init__(torch.cuda.Stream(torch.cuda.current_device()))
        self.uuid = gpu_name(self._index)

    def check(self, key: str, tensor: torch.Tensor, link: str) -> None:
        """Raise UnsupportedError if ``tensor`` is on another device."""
        if not tensor.is_cuda or tensor.device.index != self._index:
            raise UnsupportedError(
                f"{link} carries tensors on cuda:{self._index} and {key!r} is on {tensor.device}; "
                'use transport "shm"'
            )

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Allocate memory. Returns it as uint8 [nbytes], and the handle by which another process maps
        it."""
        memory = _Memory(self, nbytes)
        handle = _Handle()
        self._driver_call("cuIpcGetMemHandle", ctypes.byref(handle), memory.address)
        # The tensor keeps `memory` alive, and the views keep the tensor's storage.
        return torch.as_tensor(memory, device=f"cuda:{self._index}"), bytes(handle)

    def map(self, handle: bytes, uuid: str) -> int:
        """Map another process's memory, which is on the device ``uuid``; returns its address. Raises
        UnsupportedError: this device cannot reach it."""
        self._check_peer(uuid)
        address = ctypes.c_uint64()
        self._driver_call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return address.value

    def unmap(self, address: int) -> None:
        """Undo :meth:`map`, after waiting for the copies so far."""
        # wait: none of its own, `stall_timeout` for the iteration; the device
        self.copies.synchronize()
        self._driver_call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def event(self) -> tuple[Any, bytes]:
        """An event, and the handle by which another process opens it."""
        with torch.cuda.device(self._index):
            event = torch.cuda.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, handle: bytes) -> Any:
        """An event of another process."""
        return torch.cuda.Event.from_ipc_handle(torch.device("cuda", self._index), handle)

    def copy(self, to: int, tensor: torch.Tensor) -> None:
        """Queue a copy of a contiguous tensor to the address ``to``."""
        # torch's allocator keeps its memory until the copy is done.
        tensor.record_stream(self.copies)
        self._driver_call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(tensor.data_ptr()),
            ctypes.c_size_t(tensor.nbytes),
            ctypes.c_void_p(self.copies.cuda_stream),
        )

    def now(self) -> Any:
        """The calling thread's current stream."""
        return torch.cuda.current_stream(self._index)

    def _check_peer(self, uuid: str) -> None:
        """Refuse a GPU whose memory the driver says cannot be reached. One that this process does not
        see is not refused: CUDA opens handles of memory that lies on such GPUs too."""
        for index in range(torch.cuda.device_count()):
            if gpu_name(index) == uuid and index != self._index:
                if not torch.cuda.can_device_access_peer(self._index, index):
                    raise UnsupportedError(
                        f"CUDA says that cuda:{self._index} cannot reach the memory of cuda:{index} "
                        "(nvidia-smi topo -p2p r)"
                    )
                return


def gpu_name(index: int) -> str:
    """Name of a GPU in every process of a host: its UUID, or that of the MIG slice."""
    slices = named_slices()  # CUDA may say the UUID of their GPU, which they have in common
    return slices[0] if slices else str(torch.cuda.get_device_properties(index).uuid)


class _Handle(ctypes.Structure):
    """A CUipcMemHandle, which travels by value."""

    _fields_ = (("data", ctypes.c_char * _IPC_HANDLE_BYTES),)


class _Memory:
    """Device memory that is freed with the last tensor on it."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.address = ctypes.c_uint64()
        self._device: CudaDevice | None = None
        device._driver_call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(nbytes))
        self._device = device
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address.value, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if self._device is not None:
            self._device._driver_call("cuMemFree_v2", self.address)
