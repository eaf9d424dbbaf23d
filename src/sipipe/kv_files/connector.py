"""A KV connector that keeps prompts' caches in files that all servers share (docs/prefill.md).

A block of the KV cache is a folder, named by vLLM's own hash of the block's tokens and of all before
it. Each rank of each stage puts one safetensors file there, with one tensor a layer; a reader whose
stages are cut elsewhere takes the layers that it has::

    DIRECTORY/NAMESPACE/ab/abcd.../0-15.0-1.safetensors     layers 0 to 14, rank 0 of 1
                                   15-30.0-1.safetensors

NAMESPACE is a digest of what must be equal: model, its weights, dtype, block size, layout, ranks. An
engine whose weights may have changed has one of its own.
A file is written under another name and renamed, so nobody sees half of one. Each layer has a
checksum. What is not as it was written (cut off, of other contents, a link, a pipe, gone) is removed
and reported as not loaded, and the prompt is computed.

Who runs here: the engine's thread has the scheduler's side, a worker's device thread the worker's.
Guarantees: when a prompt's first token is answered, its full blocks are in the directory, if it takes
    them; files of all models together stay below ``size_gib``, the least recently used go first.
Rejected: writing behind the forward pass, in a thread. The request for the decode server would come
    before the files. Rejected: one file a layer, as vLLM's example has it: thirty times the files.
"""

from __future__ import annotations

import errno
import hashlib
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from sipipe.errors import UnsupportedError
from sipipe.kv_files.settings import settings
from sipipe.kv_files.store import Store

logger = init_logger(f"vllm.{__name__}")

FORMAT = 1
"""The version of what is in a file: another one is another namespace."""
SHORT_OF_SOMETHING = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EIO,
    errno.ESTALE,
)
"""Errors of a reader that say nothing of the file."""
READERS = 4
"""Files of a checkpoint that are read at once for their digest, each on a core."""


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks that a worker loads and stores in an iteration."""

    namespace: str = ""
    loads: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Hashes and numbers of blocks, by the request that waits for them."""
    stores: list[tuple[str, int]] = field(default_factory=list)
    """Hashes and numbers of blocks."""


class KVFiles(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector: ``kv_connector_extra_config`` has ``directory`` and, in GiB, ``size_gib``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        directory, size = settings(transfer.kv_connector_extra_config)
        self._store = Store(directory, size)
        self._loads = transfer.is_kv_consumer
        self._stores = transfer.is_kv_producer
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        parallel = vllm_config.parallel_config
        if len(groups) > 1 or parallel.decode_context_parallel_size > 1:
            raise UnsupportedError(
                "KVFiles keeps caches of one kind of attention, without context parallelism: leave "
                "out --kv-transfer-config for this model"
            )
        if not all(map(keeps_all_blocks, groups)):
            raise UnsupportedError(
                "KVFiles keeps all blocks of a prompt, and this model's attention has a window: leave "
                "out --kv-transfer-config, or give --disable-sliding-window"
            )
        self._moves = Moves()
        self._layers: int = vllm_config.model_config.get_total_num_hidden_layers()
        if role is KVConnectorRole.SCHEDULER:
            self._block_size: int = vllm_config.cache_config.block_size
            hashed = kv_cache_config.hash_block_size or self._block_size
            self._hashes_per_block = self._block_size // hashed
            self._ranks: int = parallel.tensor_parallel_size
            self._manifest = manifest(vllm_config, kv_cache_config)
            self._moves.namespace = self._store.namespace(self._manifest)
            self._store.describe(self._manifest)
            self._requests: dict[str, Any] = {}
            """Requests that run."""
            self._matched: dict[str, int] = {}
            """The first block of each that is not in the KV cache itself."""
            self._stored: dict[str, int] = {}
            """Blocks of each that were looked at for storing."""
            self._manager: Any = None
        else:
            self._ranks = parallel.tensor_parallel_size
            self._blocks: int = kv_cache_config.num_blocks
            self._caches: dict[int, torch.Tensor] = {}
            """Each layer's blocks, by the layer's index."""
            self._received: set[str] = set()
            self._invalid: set[int] = set()

    # ---- the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def _hash(self, request: Any, block: int) -> str:
        """vLLM's hash of a full block of a request, and of all before it."""
        value: bytes = request.block_hashes[(block + 1) * self._hashes_per_block - 1]
        return value.hex()

    def _is_stored(self, block_hash: str) -> bool:
        return self._store.is_whole(
            self._moves.namespace, block_hash, layers=self._layers, ranks=self._ranks
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # An adapter's name says nothing of its weights.
        if not self._loads or request.lora_request is not None:
            return 0, False
        first = num_computed_tokens // self._block_size
        end = (request.num_tokens - 1) // self._block_size  # the last token is computed
        block = first
        while block < end and self._is_stored(self._hash(request, block)):
            block += 1
        self._matched[request.request_id] = first
        count = (block - first) * self._block_size
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        self._stored[request.request_id] = 0
        if num_external_tokens:
            (numbers,) = blocks.get_block_ids()
            first = self._matched[request.request_id]
            end = first + num_external_tokens // self._block_size
            self._moves.loads[request.request_id] = [
                (self._hash(request, block), numbers[block]) for block in range(first, end)
            ]

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        moves = self._moves
        self._moves = Moves(namespace=moves.namespace)
        if not self._stores:
            return moves
        cached = scheduler_output.scheduled_cached_reqs
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or request.lora_request is not None:
                continue
            done = min(computed[request_id] + tokens, request.num_prompt_tokens)
            end = done // self._block_size
            first = self._stored[request_id]
            if end <= first:
                continue
            (numbers,) = self._manager.get_block_ids(request_id)
            for block in range(first, end):
                block_hash = self._hash(request, block)
                if not self._is_stored(block_hash):
                    moves.stores.append((block_hash, numbers[block]))
            self._stored[request_id] = end
        return moves

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002 - vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        self._stored.pop(request.request_id, None)
        self._moves.loads.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Load nothing from now on that was stored before, and store nothing that was computed before.

        vLLM calls it where caches are cleared, as before other weights come, and SiPipe's executor where
        they may have come. The files belong to the checkpoint, and to others' engines too, so they stay,
        and this engine has a folder of its own from then on. Running requests may have caches of the old
        weights: they are stored no further, unless they begin anew."""
        apart = {**self._manifest, "weights": f"those that {uuid.uuid4().hex} has been given"}
        self._moves = Moves(namespace=self._store.namespace(apart))
        self._requests.clear()
        logger.warning_once(
            "KVFiles: this engine's caches were cleared, or its weights may have changed. From now on it "
            "shares no caches with other servers; start it again to have that back"
        )
        return True

    # ---- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._caches = {
                # A kernel's blocks may be parts of the scheduler's, as on GPUs.
                extract_layer_index(name): group_kernel_blocks(cache, self._blocks)
                for name, cache in kv_caches.items()
            }
        except (AssertionError, AttributeError):
            # A name with numbers of a layer and of a part of it, or states that are no blocks.
            self._caches = {}
        if len(self._caches) < len(kv_caches):
            raise UnsupportedError(
                "KVFiles keeps one cache a layer, an entry for each block, and this model has others: "
                "leave out --kv-transfer-config"
            )
        first = min(self._caches)
        end = max(self._caches) + 1
        rank = get_tensor_model_parallel_rank()
        self._file = f"{first}-{end}.{rank}-{self._ranks}.safetensors"
        self._rank = rank

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        moves: Any = self._get_connector_metadata()
        for request_id, blocks in moves.loads.items():
            for block_hash, number in blocks:
                if not self._load(moves.namespace, block_hash, number):
                    self._invalid.add(number)
            self._received.add(request_id)

    def _load(self, namespace: str, block_hash: str, number: int) -> bool:
        """Load a block; False: not all of its layers were there."""
        missing = set(self._caches)
        for path, first, end, rank in self._store.files(namespace, block_hash):
            if rank != self._rank or end > self._layers:
                continue
            layers = missing & set(range(first, end))
            if not layers:
                continue
            shapes = {layer: self._caches[layer][number] for layer in layers}
            try:
                tensors = self._store.read(path, f"{namespace}/{block_hash}", shapes)
            except Exception as error:  # whatever a file of any content raises
                logger.warning("KV file %s is left out: %s", path, error)
                if not is_for_want_of_room(error):
                    with suppress(OSError):
                        path.unlink()
                continue
            for layer, tensor in tensors.items():
                self._caches[layer][number].copy_(tensor)
            missing -= layers
        return not missing

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request waits until its blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored after the forward pass, all layers at once."""

    def wait_for_save(self) -> None:
        moves: Any = self._get_connector_metadata()
        for block_hash, number in moves.stores:
            tensors = {layer: cache[number] for layer, cache in self._caches.items()}
            self._store.write(moves.namespace, block_hash, self._file, tensors)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        received = self._received
        self._received = set()
        return None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = self._invalid
        self._invalid = set()
        return invalid


def keeps_all_blocks(spec: Any) -> bool:
    """Say if a request keeps all of its blocks in a cache of this kind. With a window vLLM gives the
    blocks before it up, and has the null block in their places, which would be stored as theirs."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(keeps_all_blocks, spec.kv_cache_specs.values()))
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)


def is_for_want_of_room(error: Exception) -> bool:
    """Say if a file could not be read because this process, or its disk, was short of something: the
    file may be whole, and others can read it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in SHORT_OF_SOMETHING
    )


def manifest(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Describe what must be equal where a cache is computed and where it is used."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    config = model.hf_config
    compared: dict[str, Any] = {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "model": digest_of_weights(model.model) or model.model,
        # A branch, which is what users name, moves on.
        "revision": getattr(config, "_commit_hash", None) or model.revision,
        "config": hashlib.sha256(config.to_json_string().encode()).hexdigest(),
        "implementation": str(model.model_impl),
        # Rotary embeddings may depend on it: Phi 3's short or long factors.
        "max_model_len": model.max_model_len,
        "windows": not model.disable_sliding_window,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "hash": str(cache.prefix_caching_hash_algo),
        "layout": str(kv_cache_config.kv_cache_layout),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "device": str(vllm_config.device_config.device_type),
        # On CPUs the kernels' instruction set decides how keys lie in a block. vLLM asks for AMX by this
        # name; the capability knows nothing of it.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }
    if vllm_config.load_config.load_format == "dummy":
        compared["weights"] = "random ones"  # not the checkpoint's
    return compared


def digest_of_weights(model: str) -> str:
    """A digest of all that a local checkpoint's files have, of the names of those in a directory too.
    Empty: the model is not local, and its name and revision say what it is.

    The files are read whole, as the workers will: of two checkpoints that differ in one tensor, as after
    a training of some layers, no sample is sure to differ.
    """
    path = Path(model)
    if path.is_file():
        return _digest_of_file(path)
    if not path.is_dir():
        return ""
    patterns = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.py")
    files = sorted(file for pattern in patterns for file in path.glob(pattern) if file.is_file())
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    logger.info("KVFiles reads the checkpoint (%.1f GB) to know it by its content", gigabytes)
    with ThreadPoolExecutor(READERS) as pool:
        digests = list(pool.map(_digest_of_file, files))
    digest = hashlib.sha256()
    for file, content in zip(files, digests, strict=True):
        digest.update(f"{file.name} {content} ".encode())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
