"""Compilation of the kernels, and where the compiled code is kept.

Kernels are compiled by Numba without the GIL and cached on disk, so that a sampler process starts
in well under two seconds. Numba's own cache decides freshness by the time stamp of the file that
holds a function, which misses a change in a file it calls into, and lets CPUs of different types
share one index file. Here the directory itself is keyed by everything that the machine code depends
on: a hash of every source file of this package, the versions of Numba and NumPy, and the CPU's name
and features.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

F = TypeVar("F", bound=Callable[..., Any])


@cache
def cache_key() -> str:
    """Hash of all that compiled kernels depend on: sources, Numba, NumPy, CPU name and features."""
    digest = hashlib.sha256()
    for part in (
        numba.__version__,
        np.__version__,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    ):
        digest.update(part.encode() + b"\0")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_directory() -> Path:
    """The directory of this machine's compiled kernels.

    ``SIPIPE_CACHE_DIR`` if set, else the user's cache directory, else a private directory under the
    system's temporary one where neither can be written (a container without a home).
    """
    named = os.environ.get("SIPIPE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    roots = [Path(named)] if named else [Path(base).expanduser() / "sipipe"]
    roots.append(Path(tempfile.gettempdir()) / f"sipipe-cache-{os.getuid()}")
    for root in roots:
        directory = root / "kernels" / cache_key()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # Cached code is executed: take no directory that another user could have filled.
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="sipipe-kernels-"))


class _Locator(_CacheLocator):
    def __init__(self, py_func: Any) -> None:
        self._name = f"{py_func.__module__.rsplit('.', 1)[-1]}"

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return cache_key()

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Any, _: str) -> _Locator:
        return cls(py_func)


class _Implementation(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - the base class declares it so


class _Cache(FunctionCache):
    _impl_class = _Implementation


# Kernels allocate nothing, so they are compiled without Numba's reference counting (`_nrt`): it
# would count every array of every call up and down, which is most of the code of a small function.


def entry(function: F) -> F:
    """Compile ``function`` on first call, to be called from Python: no GIL, cached on disk."""
    compiled = numba.njit(nogil=True, _nrt=False)(function)
    if hasattr(compiled, "_cache"):  # not under NUMBA_DISABLE_JIT
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


def kernel(function: F) -> F:
    """Compile ``function`` for other kernels only.

    Without the wrappers that would let Python call it: unpacking a few dozen arrays in each of
    some forty functions took most of the time that compilation takes.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(nogil=True, _nrt=False, **options)(function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Hold while kernels are compiled: one process fills the cache, others wait and then load it.

    The lock is the kernel's (``flock``), so a process that dies while compiling frees it.
    """
    with open(cache_directory() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
