"""Compilation of all compiled kernels, and where their machine code is kept.

Numba compiles without the GIL and keeps the code on disk. Its own cache judges by the time stamp of
the file that holds a function, which misses a change in a helper that is inlined; it lets CPUs of
different types share one index; and it fails at import where nothing can be written. Here the
directory is named by a hash of everything that the machine code depends on.

Relies on: a kernel calls other kernels of its own package only, because the hash covers that
package and this file. Cached code is executed, so it is loaded only from directories that no other
user can have written to (:mod:`sipipe.private`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import _dynfunc
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.serialize import dumps

from sipipe.errors import tell
from sipipe.private import UnusableError, named_directory, private_directory, refused

PATIENCE = 180.0
F = TypeVar("F", bound=Callable[..., Any])


@cache
def cache_key(package: str) -> str:
    """Hash of what ``package``'s kernels depend on: sources, Numba, NumPy, CPU name and features."""
    digest = hashlib.sha256()
    cpu = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    for part in (numba.__version__, np.__version__, *cpu):
        digest.update(part.encode() + b"\0")
    folder = Path(importlib.import_module(package).__path__[0])
    for source in (Path(__file__), *sorted(folder.glob("*.py"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def cache_directory(package: str) -> Path:
    """The directory of ``package``'s compiled kernels: under ``SIPIPE_CACHE_DIR`` if set, else the
    user's cache directory; where that cannot be taken, which is said, the system's temporary one.
    Raises ConfigError: the named one cannot be taken. It is not replaced: who names one relies on
    it, as on what an image holds, or on code that only they have written."""
    key = cache_key(package)
    if (named := named_directory()) is not None:
        try:
            return private_directory(named, ["kernels", key])
        except (OSError, RuntimeError, UnusableError) as error:
            raise refused(named, error) from None
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    reasons = []
    try:
        above = home.expanduser()
        above.mkdir(parents=True, exist_ok=True)
        return private_directory(above / "sipipe", ["kernels", key])
    except (OSError, RuntimeError, UnusableError) as error:  # RuntimeError: this user has no home
        reasons.append(str(error))
    with contextlib.suppress(OSError, UnusableError):
        ours = Path(tempfile.gettempdir(), f"sipipe-cache-{os.getuid()}")
        # What is above it is not this user's alone, so a link may not stand there.
        if not ours.is_symlink():
            directory = private_directory(ours, ["kernels", key])
            _say_where(directory, reasons)
            return directory
    directory = Path(tempfile.mkdtemp(prefix="sipipe-kernels-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _say_where(directory, reasons)
    return directory


def _say_where(directory: Path, reasons: list[str]) -> None:
    tell(f"compiled kernels are in {directory}, because {'; '.join(reasons)}")


class _Locator(_CacheLocator):
    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._package, _, self._name = py_func.__module__.rpartition(".")

    def get_cache_path(self) -> str:
        return str(cache_directory(self._package))

    def get_source_stamp(self) -> str:
        return cache_key(self._package)

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Any, _: str) -> _Locator:
        return cls(py_func)


class _Implementation(CompileResultCacheImpl):
    """Adds a checksum: machine code with a wrong byte in it is loaded like any other."""

    _locator_classes = [_Locator]  # noqa: RUF012 - the base class declares it so

    def reduce(self, data: Any) -> Any:
        code = dumps(super().reduce(data))
        return hashlib.sha256(code).digest(), code

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        digest, code = payload
        if hashlib.sha256(code).digest() != digest:
            raise ValueError("its checksum is wrong")
        return super().rebuild(target_context, pickle.loads(code))


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # whatever a file of any content raises as it is unpickled
            found, files = None, f"{self._cache_file._index_path[:-4]}.nb[ci]"
            tell(f"a file of {files} is damaged ({type(error).__name__}: {error}): compiled anew")
            with contextlib.suppress(OSError):  # it may be read only
                self.flush()
        if found is None:
            _say_that_it_takes_time(self._py_func.__module__.rpartition(".")[0])
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        # Others may not be able to write what is executed, whatever they may do with other files.
        usual = os.umask(0o077)
        try:
            with contextlib.suppress(OSError):  # no room, or no more: it stays in memory
                super().save_overload(sig, data)
        finally:
            os.umask(usual)


@cache
def _say_that_it_takes_time(package: str) -> None:
    """Once in a process: nobody should wonder why the first call does not return."""
    tell(f"compiling {package} for this CPU, once: up to a minute (`sipipe warm` does it ahead)")


# Kernels allocate nothing, so they are compiled without Numba's reference counting (`_nrt`): it
# would count every array of every call up and down, which is most of the code of a small function.


class _PartLibrary(JITCodeLibrary):
    """Code that only others call: it is optimized and translated as a part of theirs, once. Numba
    does it for each by itself as well, which took more than half of the time."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, _library: Any, *rest: Any) -> None:
        super().__init__(typing, target, _PartLibrary(target.codegen(), "part"), *rest)
        self.state.targetctx.get_executable = self._no_executable  # of a copy, for this function

    @staticmethod
    def _no_executable(library: Any, described: Any, environment: Any) -> Any:
        module = described.lookup_module()
        return _dynfunc.make_function(module, described.qualname, "", 0, environment, (library,))


_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy"}  # by zero: inf, no exception


def entry(function: F) -> F:
    """Compile ``function`` on first call, to be called from Python: no GIL, cached on disk."""
    compiled = numba.njit(**_OPTIONS)(function)
    if hasattr(compiled, "_cache"):  # not under NUMBA_DISABLE_JIT
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


def kernel(function: F) -> F:
    """Compile ``function`` for other kernels only, without the wrappers that would let Python call
    it: to unpack dozens of arrays in each took most of the time that compilation takes."""
    without = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    make = numba.njit(pipeline_class=_PartCompiler, **_OPTIONS, **without)
    return make(function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def compiling(package: str) -> Iterator[None]:
    """Hold while ``package``'s kernels are compiled: one process fills the cache, others wait. A
    process that dies frees the lock (``flock``). One that is stopped does not: after ``PATIENCE``
    seconds the others compile for themselves."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as opened:
        # OSError: it was written before and can no more, or its file system has no locks.
        with contextlib.suppress(OSError):
            file = opened.enter_context(open(cache_directory(package) / "lock", "w"))
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                # wait: `PATIENCE`, then it compiles for itself; who compiles, or its death
                time.sleep(0.05)
        yield
