"""A KV connector of the tests: whole blocks of finished prompts lie on a shelf, a directory.

Its transfers are asynchronous. A request waits until every worker has its blocks, and blocks are held
until every worker has put them on the shelf. A block of which another stage's part is not there yet is
damaged. An assertion fails where calls come in another order, or in another thread, than vLLM's
interface says.

Its extra configuration has the ``directory``; ``fails``, n to report every n-th block that it loads as
damaged, 0 for none; and ``slow``, the seconds until a transfer is made.
"""

import hashlib
import itertools
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


def name_of(tokens):
    """The name of the block that ends with the last of a prompt's ``tokens``."""
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def put(file, block):
    """Write ``block`` to ``file``, of which nobody sees half."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    torch.save(block, new)
    os.replace(new, file)


@dataclass
class Moves(KVConnectorMetadata):
    """Transfers of one iteration, each with the request, the names of its blocks and their numbers."""

    loads: list = field(default_factory=list)
    stores: list = field(default_factory=list)


class Shelf(KVConnectorBase_V1):
    """The connector, on the scheduler's side or a worker's."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block = vllm_config.cache_config.block_size
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.directory = Path(extra["directory"])
        # The scheduler's side.
        self.wanted = {}
        """Names of the blocks that a request is to load, by request."""
        self.tried = set()
        """Requests whose blocks have been loaded once."""
        self.moves = Moves()
        """Transfers of the next iteration."""
        if role is KVConnectorRole.WORKER:
            self.engine_id = vllm_config.kv_transfer_config.engine_id
            (self.directory / f"engine-{self.engine_id}").touch()
            self.caches = {}
            self.state = "clear"
            """Name of the call of an iteration that came last (:meth:`step`)."""
            self.thread = None
            self.rank = f"rank{get_tensor_model_parallel_rank()}"
            self.sent = set()
            self.received = set()
            self.damaged = set()
            self.fails = extra.get("fails", 0)
            self.counted = itertools.count(1)
            """Numbers of the blocks that are loaded."""
            self.slow = extra.get("slow", 0)
            self.loads = deque()
            self.stores = deque()
            """Transfers that wait, each with the time when it is made; so in ``loads``."""

    def names(self, tokens):
        """The names of the blocks that the tokens fill."""
        full = range(self.block, len(tokens) + 1, self.block)
        return [name_of(tokens[:end]) for end in full]

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        names = self.names(list(request.prompt_token_ids[:-1]))
        stored = list(itertools.takewhile(lambda name: (self.directory / name).exists(), names))
        matched = len(stored) * self.block - num_computed_tokens
        if matched <= 0 or request.request_id in self.tried:
            return 0, False
        self.wanted[request.request_id] = stored[num_computed_tokens // self.block :]
        return matched, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.tried.add(request.request_id)
            names = self.wanted[request.request_id]
            ids = blocks.get_block_ids()[0]
            self.moves.loads.append((request.request_id, names, ids[-len(names) :]))

    def build_connector_meta(self, scheduler_output):
        moves = self.moves
        self.moves = Moves()
        return moves

    def request_finished(self, request, block_ids):
        self.wanted.pop(request.request_id, None)
        names = self.names(list(request.prompt_token_ids))
        if request.num_computed_tokens < request.num_prompt_tokens or not names:
            return False, None
        self.moves.stores.append((request.request_id, names, block_ids[: len(names)]))
        return True, None

    # ---- a worker's

    def step(self, before, after):
        """Calls of an iteration come in order, in one thread."""
        thread = threading.current_thread()
        assert self.thread in (None, thread), (self.thread, thread)
        assert self.state in before, f"{after} after {self.state}"
        self.thread = thread
        self.state = after

    def due(self, waiting, moves):
        """The transfers that are made now, of those that wait and of ``moves``, which are new."""
        now = time.monotonic()
        waiting.extend((now + self.slow, *move) for move in moves)
        while waiting and waiting[0][0] <= now:
            yield waiting.popleft()[1:]

    def register_kv_caches(self, kv_caches):
        assert not self.caches
        self.caches = kv_caches

    def bind_connector_metadata(self, connector_metadata):
        self.step({"clear"}, "bound")
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context, **_):
        self.step({"bound"}, "loading")
        moves = self._get_connector_metadata().loads
        for request, names, ids in self.due(self.loads, moves):
            for name, block in zip(names, ids, strict=True):
                for layer, cache in self.caches.items():
                    part = self.directory / name / (layer + self.rank)
                    if part.exists():
                        cache[block] = torch.load(part)
                    else:
                        self.damaged.add(block)
                if self.fails and not next(self.counted) % self.fails:
                    self.damaged.add(block)
            self.received.add(request)

    def wait_for_layer_load(self, layer_name):
        assert self.state in ("bound", "loading")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **_):
        assert self.state in ("bound", "loading")

    def wait_for_save(self):
        self.step({"loading"}, "saved")
        moves = self._get_connector_metadata().stores
        for request, names, ids in self.due(self.stores, moves):
            for name, block in zip(names, ids, strict=True):
                (self.directory / name).mkdir(exist_ok=True)
                for layer, cache in self.caches.items():
                    put(self.directory / name / (layer + self.rank), cache[block].clone())
            self.sent.add(request)

    def get_finished(self, finished_req_ids):
        self.step({"saved"}, "reported")
        sent = self.sent
        received = self.received
        self.sent = set()
        self.received = set()
        return sent, received

    def get_block_ids_with_load_errors(self):
        damaged = self.damaged
        self.damaged = set()
        return damaged

    def clear_connector_metadata(self):
        self.step({"reported"}, "clear")
        super().clear_connector_metadata()
