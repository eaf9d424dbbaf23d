"""Files of KV cache blocks that several processes of several hosts write, read and remove at once.

Who runs here: whoever has a :class:`Store`, in one thread.
Guarantees: a file appears whole or not at all; what is read is what was written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

logger = logging.getLogger(f"vllm.{__name__}")

NAME = re.compile(r"(\d{1,5})-(\d{1,5})\.(\d{1,4})-(\d{1,4})\.safetensors")
NAMESPACE = re.compile(r"[0-9a-f]{32}")
"""Name of a folder of all that agree on what must be equal."""
NEW = ".new"
"""Ending of the name of a file that is being written."""
MANIFEST = "manifest.json"
"""Name of the file in such a folder that says what that is."""
UNFINISHED = re.compile(rf"({NAME.pattern}|manifest\.json)\.\w+\{NEW}")
LEFT_OVER = 3600.0
"""Seconds after which a file that is being written belongs to a writer that ended amid it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or a user's share of it, that has less room than the store's size."""
HEADER = 1 << 20
"""Bytes that a file may have besides its tensors."""


class DamagedFileError(ValueError):
    """A file that is not as its writer left it."""


class Store:
    """The files below ``directory``, of ``size`` bytes at most.

    Several processes of several hosts use one store at once: a file appears whole or not at all, and
    whoever removes files has the lock of ``.lock``.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.size = size
        # Looked at with the first file, then each 64th of the size: sixteen writers stay below the
        # size, as a quarter of it is left above what is looked for.
        self._written = size
        self._logged = False

    def namespace(self, manifest: dict[str, Any]) -> str:
        """The name of the folder of all that agree on ``manifest``."""
        return hashlib.sha256(_text(manifest)).hexdigest()[:32]

    def describe(self, manifest: dict[str, Any]) -> None:
        """Write ``manifest`` into the folder of all that agree on it, for people to read."""
        try:
            self._put(self.directory / self.namespace(manifest) / MANIFEST, _text(manifest))
        except OSError as error:
            self._log(error)

    def folder(self, namespace: str, block_hash: str) -> Path:
        return self.directory / namespace / block_hash[:2] / block_hash

    def files(self, namespace: str, block_hash: str) -> Iterator[tuple[Path, int, int, int]]:
        """A block's files: path, first layer, the layer after the last, rank."""
        folder = self.folder(namespace, block_hash)
        for name in sorted(_names(folder)):
            if match := NAME.fullmatch(name):
                first, end, rank, _ = map(int, match.groups())
                yield folder / name, first, end, rank

    def is_whole(self, namespace: str, block_hash: str, *, layers: int, ranks: int) -> bool:
        """Say if there are files of all layers and ranks, by their names."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for _, first, end, rank in self.files(namespace, block_hash):
            spans.setdefault(rank, []).append((first, end))
        for rank in range(ranks):
            reached = 0
            for first, end in sorted(spans.get(rank, ())):
                if first <= reached:
                    reached = max(reached, end)
            if reached < layers:
                return False
        return True

    def read(
        self, path: Path, name: str, layers: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Tensors of a file, each checked, of the shapes and dtypes of ``layers``'.

        Raises:
            OSError: it cannot be read.
            ValueError, SafetensorError: it is not what was written.
        """
        # Neither a link, which leads out of the store, nor a pipe, at which a reader waits.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            block = next(iter(layers.values()))
            first, end, *_ = map(int, NAME.fullmatch(path.name).groups())  # type: ignore[union-attr]
            most = block.nbytes * (end - first) + HEADER
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise DamagedFileError("it is no file of this size")
            content = file.read(most)
            with suppress(OSError):  # of another user: it is as old as it looks
                os.utime(handle)
        try:
            tensors = safetensors.torch.load(content)
        except LookupError as error:  # a type of numbers that torch lacks
            raise DamagedFileError(f"its tensors are of type {error}") from None
        start = 8 + int.from_bytes(content[:8], "little")
        words = json.loads(content[8:start]).get("__metadata__") or {}
        if words.get("name") != name:
            raise DamagedFileError("it is another block's")
        read: dict[int, torch.Tensor] = {}
        for layer, cache in layers.items():
            tensor = tensors.get(str(layer))
            if tensor is None or tensor.shape != cache.shape or tensor.dtype != cache.dtype:
                raise DamagedFileError(f"layer {layer} is missing, or of another shape")
            if words.get(f"crc {layer}") != checksum(tensor) or not is_finite(tensor):
                raise DamagedFileError(f"layer {layer} is damaged")
            read[layer] = tensor
        return read

    def write(
        self, namespace: str, block_hash: str, name: str, tensors: dict[int, torch.Tensor]
    ) -> None:
        """Store a block, if the disk takes it and its values are finite: nothing depends on it.

        While another writer removes files, this one stores a sixteenth of the size at most, so that
        four of them stay within it however long that takes.
        """
        folder = self.folder(namespace, block_hash)
        copies = {str(layer): tensor.cpu().contiguous() for layer, tensor in tensors.items()}
        if not all(map(is_finite, copies.values())):
            return
        words = {f"crc {layer}": checksum(tensor) for layer, tensor in copies.items()}
        words["name"] = f"{namespace}/{block_hash}"
        content = safetensors.torch.save(copies, words)
        try:
            if self._written * 16 > self.size:
                self.directory.mkdir(parents=True, exist_ok=True)
                self.evict()
            if self._written * 16 > self.size:
                return
            self._put(folder / name, content)
            self._written += len(content)
            if self._written * 64 > self.size:
                self.evict()
        except OSError as error:
            self._log(error)
            if error.errno in FULL:
                self._make_room()

    def _make_room(self) -> None:
        """Remove what was used longest ago: the disk is smaller than the size, or others fill it."""
        with suppress(OSError):
            self.evict(disk_is_full=True)

    def _put(self, path: Path, content: bytes) -> None:
        """Write a file, whole or not at all, and the folders above it."""
        try:
            self._put_once(path, content)
        except FileNotFoundError:  # who removes files took the empty folder for one to go
            self._put_once(path, content)

    def _put_once(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}{NEW}")
        try:
            new.write_bytes(content)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def evict(self, *, disk_is_full: bool = False) -> None:
        """Remove the files that were used longest ago while there are more than 3/4 of the size, to
        5/8 of it; and what writers left that ended amid a file.

        Args:
            disk_is_full: take what there is for the size.
        """
        with open(self.directory / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # somebody does it now; the next file asks again
                return
            self._written = 0
            self._remove_empty_folders()
            found: list[tuple[float, int, str]] = []
            for path in self._own_files():
                with suppress(OSError):
                    status = os.lstat(path)
                    if path.endswith(NEW) and time.time() - status.st_mtime > LEFT_OVER:
                        os.unlink(path)
                    else:
                        found.append((status.st_mtime, status.st_size, path))
            total = sum(size for _, size, _ in found)
            most = min(self.size, total) if disk_is_full else self.size
            if total <= most * 3 // 4:
                return
            for _, size, path in sorted(found):
                if total <= most * 5 // 8:
                    break
                with suppress(OSError):
                    os.unlink(path)
                    total -= size
                    os.rmdir(os.path.dirname(path))  # while other layers are there it stays

    def _own_files(self) -> Iterator[str]:
        """Paths of the files that a Store has written, of all namespaces, also unfinished ones. Whatever
        else is in the directory, such as a model's safetensors, is not for this class to remove."""
        for namespace in _folders(self.directory):
            folders = [namespace]
            for beginning in _folders(namespace):
                blocks = _folders(beginning)
                folders += [block for block in blocks if block.name[:2] == beginning.name]
            for folder in folders:
                for name in _names(folder):
                    if NAME.fullmatch(name) or UNFINISHED.fullmatch(name):
                        yield os.path.join(folder, name)

    def _remove_empty_folders(self) -> None:
        """Remove folders that hold no block any more. A server whose weights change again and again has
        a namespace each time."""
        for namespace in _folders(self.directory):
            if not NAMESPACE.fullmatch(namespace.name):
                continue
            for beginning in _folders(namespace):
                with suppress(OSError):  # blocks are there
                    os.rmdir(beginning)
            with suppress(OSError):
                manifest = namespace / MANIFEST
                age = time.time() - os.lstat(manifest).st_mtime
                if age > LEFT_OVER and os.listdir(namespace) == [MANIFEST]:
                    os.unlink(manifest)
            with suppress(OSError):
                os.rmdir(namespace)

    def _log(self, error: OSError) -> None:
        if not self._logged:
            self._logged = True
            logger.warning(
                "KVFiles cannot write to %s (%s): prompts are computed, and not kept. Where the disk is "
                "full, files that were used longest ago are removed. This is logged once",
                self.directory,
                error,
            )


def _text(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def _names(folder: Path) -> list[str]:
    """Names of what is in a folder; none where it is not there."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without links to others; none where it is not there."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def checksum(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's bytes on the host."""
    return str(zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()))


def is_finite(tensor: torch.Tensor) -> bool:
    """Say if no value is infinite or NaN; tensors of bytes have no such values."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        return True
    return bool(tensor.isfinite().all())
