"""Compiled files that are whole, also after a start that was killed.

torch's inductor has a C++ compiler write into its cache in place, and takes a file that exists for one
that is whole. An engine that ends while it compiles (Ctrl-C in its first start is enough) leaves a part
of a file there, at which each later start would end ("file too short", "cannot read PCH file"), whichever
engine it is of.

Here a file is compiled beside its place, and renamed. And one that another program has left half built,
such as stock vLLM, is built again: before torch builds a file it makes a directory beside it, which it
removes when the file is whole. Who builds holds the file's lock, which the kernel takes from a process
that ends. So where nobody holds the lock, and the directory is there, the file may not be whole.

Who runs here: any thread of a worker that compiles.
Rejected: a look at the file itself. An ELF file tells its length, a precompiled header does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch._inductor import codecache, cpp_builder
from torch.utils._filelock import FileLock

from sipipe.extending import extends


def build_whole_files() -> None:
    """Have torch, in this process, leave no half-built file behind and use none."""

    @extends(cpp_builder.CppBuilder, "build")
    def build_beside(build: Callable[[Any], None], builder: Any) -> None:
        place = builder.get_target_file_path()
        # Always the same name: what a killed process has left is overwritten.
        partial_file = f"{place}.part"
        output = builder._output
        builder._output = output.replace(place, partial_file)
        try:
            build(builder)
            os.replace(partial_file, place)
        finally:
            builder._output = output

    @extends(codecache, "_worker_compile_cpp")
    def build_again(
        build_missing: Callable[..., None], lock_path: str, cpp_builders: Sequence[Any]
    ) -> None:
        # wait: torch's own bound of a build's lock; who builds, or the kernel if it dies
        with FileLock(lock_file=lock_path, timeout=codecache.LOCK_TIMEOUT):
            for builder in cpp_builders:
                if os.path.isdir(_directory_beside(builder)):
                    with suppress(FileNotFoundError):
                        os.unlink(builder.get_target_file_path())
        # Another process may have the lock in between. It builds the file then, whole.
        build_missing(lock_path, cpp_builders)


def _directory_beside(builder: Any) -> str:
    """The directory that is there while ``builder`` builds."""
    return os.path.join(builder._output_dir, f"{builder._name}_{cpp_builder._BUILD_TEMP_DIR}")
