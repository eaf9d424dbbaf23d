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
from sipipe.private import (
    UnusableError,
    cache_base,
    code_directory,
    named_directory,
    refused,
)

PATIENCE = 180.0
"""Seconds that a process waits for another that compiles the same kernels: three times what they
take on one busy core."""
F = TypeVar("F", bound=Callable[..., Any])


TEMPORARY = "sipipe-kernels-"
"""Beginning of the name of a directory of kernels that is removed when its process ends."""


@cache
def cache_key(package: str) -> str:
    """Hash of what ``package``'s kernels depend on: sources, Numba, NumPy, CPU name and features."""
    digest = hashlib.sha256()
    name = binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten()
    for part in (numba.__version__, np.__version__, name, features):
        digest.update(part.encode() + b"\0")
    folder = Path(importlib.import_module(package).__path__[0])
    for source in (Path(__file__), *sorted(folder.glob("*.py"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def cache_directory(package: str) -> Path:
    """The directory of ``package``'s compiled kernels, which no other user can write to.

    It is under ``SIPIPE_CACHE_DIR`` if that is set, else in the user's cache directory. Where that
    cannot be used, it is in the system's temporary directory, and a line on stderr says so.

    Raises ConfigError: the directory that ``SIPIPE_CACHE_DIR`` names cannot be used. No other takes
    its place, because whoever names one relies on it: on what an image holds, say, or on code that
    only they have written."""
    parts = ["kernels", cache_key(package)]
    named = named_directory()
    if named is not None:
        try:
            return code_directory(named, parts)
        except (OSError, RuntimeError, UnusableError) as error:
            raise refused(named, error) from None
    try:
        return code_directory(cache_base(), parts)
    except (OSError, RuntimeError, UnusableError) as error:  # RuntimeError: this user has no home
        reason = str(error)
    directory = _in_temporary_directory(parts)
    tell(f"compiled kernels are in {directory}, because {reason}")
    return directory


def _in_temporary_directory(parts: list[str]) -> Path:
    """The directory ``parts`` of this user below /tmp; if somebody else could write there, a new
    directory that is removed when this process ends."""
    base = Path(tempfile.gettempdir(), f"sipipe-cache-{os.getuid()}")
    with contextlib.suppress(OSError, UnusableError):
        # Everybody can write in /tmp, so somebody else may have put a link there.
        if not base.is_symlink():
            return code_directory(base, parts)
    directory = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


class _Locator(_CacheLocator):
    """Numba's interface to where a function's code is kept, and to what tells that it is stale."""

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
    """Numba's form of a compiled function on disk, with a checksum: machine code with a wrong byte
    in it would be loaded like any other, and executed."""

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
    """Numba's cache of one function, which compiles anew where a file cannot be read or written."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            overload = super().load_overload(sig, target_context)
        except Exception as error:  # whatever a file of any content raises as it is unpickled
            overload = None
            files = f"{self._cache_file._index_path[:-4]}.nb[ci]"
            tell(f"a file of {files} is damaged ({type(error).__name__}: {error}): compiled anew")
            with contextlib.suppress(OSError):  # the directory may be read only
                self.flush()
        if overload is None:
            _say_that_it_takes_time(self._py_func.__module__.rpartition(".")[0])
        return overload

    def save_overload(self, sig: Any, data: Any) -> None:
        # The file is executed later, so nobody else may write it, whatever umask the user has.
        umask = os.umask(0o077)
        try:
            # The disk is full, or can no longer be written. Or the index that is there is damaged, which
            # may raise anything, and could not be removed. The code stays in memory.
            with contextlib.suppress(Exception):
                super().save_overload(sig, data)
        finally:
            os.umask(umask)


@cache
def _say_that_it_takes_time(package: str) -> None:
    """Tell once in a process that kernels are compiled, so that nobody wonders why it is silent."""
    tell(f"compiling {package} for this CPU, once: up to a minute (`sipipe warm` does it ahead)")


# Kernels allocate nothing, so they are compiled without Numba's reference counting (`_nrt`): it
# would count every array of every call up and down, which is most of the code of a small function.


class _PartLibrary(JITCodeLibrary):
    """Code of a kernel that only other kernels call. It is optimized and translated once, as a part
    of theirs. Numba would also do it for each kernel by itself, which took more than half of the
    time."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's compiler of a kernel that only other kernels call: it makes no executable code."""

    def __init__(self, typing: Any, target: Any, _library: Any, *options: Any) -> None:
        super().__init__(typing, target, _PartLibrary(target.codegen(), "part"), *options)
        # `targetctx` is a copy that Numba makes for this function, so no other kernel sees it.
        self.state.targetctx.get_executable = self._no_executable

    @staticmethod
    def _no_executable(library: Any, descriptor: Any, environment: Any) -> Any:
        """A function object that holds ``library`` for its callers, and has address 0."""
        module = descriptor.lookup_module()
        return _dynfunc.make_function(module, descriptor.qualname, "", 0, environment, (library,))


# With NumPy's error model a division by zero gives inf, as kernels expect, and raises nothing.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy"}


def entry(function: F) -> F:
    """Compile ``function`` on its first call, to be called from Python. It runs without the GIL, and
    its machine code is cached on disk."""
    compiled = numba.njit(**_OPTIONS)(function)
    if hasattr(compiled, "_cache"):  # not under NUMBA_DISABLE_JIT
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


def kernel(function: F) -> F:
    """Compile ``function`` for other kernels only, without the wrappers through which Python would
    call it. A wrapper unpacks dozens of arrays, which took most of the time of compilation."""
    compiled = numba.njit(
        pipeline_class=_PartCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS
    )
    return compiled(function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def compiling(package: str) -> Iterator[None]:
    """Hold a lock while ``package``'s kernels are compiled: one process fills the cache, and the
    others wait. The lock is a ``flock``, which the kernel frees when its process dies. A process that
    is stopped keeps it: after ``PATIENCE`` seconds the others compile for themselves."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        # OSError: the directory can no longer be written, or its file system has no locks.
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(cache_directory(package) / "lock", "w"))
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                # wait: `PATIENCE`, then it compiles for itself; who compiles, or its death
                time.sleep(0.05)
        yield
