"""A draft head on the last stage: vLLM's own speculator, loaded and given its attention.

vLLM's runner makes its speculator from its own configuration, samples, and has it propose in the same
call. Here the samplers draw, on other cores, and the runner of every stage knows of no drafts. So the
speculator is made beside the runner, which meets it while the KV cache is laid out: the head's layers
are layers of the stage.

Hidden states of earlier layers that an EAGLE-3 head reads travel with the others, under vLLM's names
for them (``aux_hidden_states_0`` and so on), and stages between hand them on.

Who runs here: whoever follows BIC-I, while the stage is loaded; the device thread.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.eagle import utils
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    aux_hidden_state_relay_keys,
    set_eagle3_aux_hidden_state_layers,
    verify_supports_aux_hidden_states_over_pp,
)

from sipipe.errors import UnsupportedError
from sipipe.worker.hooks.world import PARTITION

TAPPED = "eagle3"
"""Method whose head reads hidden states of several layers."""
EMBEDDING = "embed_tokens.weight"
"""End of the name of the input embedding in checkpoints."""


def reads_several_layers(speculative: Any) -> bool:
    """Say if the head of vLLM's ``SpeculativeConfig`` reads hidden states of several layers. Some EAGLE-3
    heads read the last one's alone, and say so in their configuration."""
    if speculative.method != TAPPED:
        return False
    eagle = getattr(speculative.draft_model_config.hf_config, "eagle_config", None) or {}
    return bool(eagle.get("use_aux_hidden_state", True))


def tap_layers(runner: Any, speculative: Any) -> None:
    """Have the loaded model of a stage, any of them, also give the hidden states that the head reads.

    Args:
        runner: vLLM's, of this stage.
        speculative: vLLM's ``SpeculativeConfig``.

    Raises:
        UnsupportedError: vLLM's model does not hand them from stage to stage.
    """
    model = runner.model
    try:
        set_eagle3_aux_hidden_state_layers(model, speculative)
        if get_pp_group().world_size > 1:
            verify_supports_aux_hidden_states_over_pp(model, speculative.method)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f'--speculative-config: method "{speculative.method}": {error}: leave the option out, or '
            'take {"method": "ngram"}'
        ) from None
    runner.use_aux_hidden_state_outputs = True
    if runner.pp_handler is not None:
        runner.pp_handler.relayed = aux_hidden_state_relay_keys(model)
    if not runner.is_first_pp_rank:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )


def load_speculator(runner: Any, speculative: Any) -> Any:
    """Make vLLM's speculator of ``speculative`` and load its model, beside the stage's of ``runner``.

    Raises UnsupportedError: the head reads what is not hosted here, or is none of this method."""
    from vllm.v1.worker.gpu.spec_decode import init_speculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
        TargetDependentARSpeculator,
    )

    from sipipe.worker.cpu_kernels import drafting
    from sipipe.worker.hooks.draft_model import HostedDraftModel

    if runner.device.type == "cpu":
        drafting.install()
    config = _of_one_stage(runner.vllm_config, speculative)
    with set_current_vllm_config(config), _uncut():
        if speculative.uses_draft_model():
            speculator = HostedDraftModel(config, runner.device)
        else:
            speculator = init_speculator(config, runner.device, runner.req_states)
        if not isinstance(speculator, (TargetDependentARSpeculator, HostedDraftModel)):
            raise UnsupportedError(
                f"--speculative-config: SiPipe does not host vLLM's {type(speculator).__name__}: take "
                '{"method": "ngram"}, or leave the option out'
            )
        lend = partial(lend_embedding, runner, utils.maybe_share_target_embed)
        with patch.object(utils, "maybe_share_target_embed", lend):
            try:
                speculator.load_model(runner.model)
            except (ValueError, KeyError, AttributeError) as error:
                raise UnsupportedError(
                    f'--speculative-config: "{speculative.model}" cannot be loaded by method '
                    f'"{speculative.method}" for this model: {" ".join(str(error).split())[:200]}'
                ) from error
    return speculator


def lend_embedding(
    runner: Any, share: Callable[..., None], draft: Any, draft_inner: Any, target_inner: Any
) -> None:
    """Stand in the place of vLLM's ``maybe_share_target_embed``: where the head has no input embedding of
    its own, and this stage has none of the target's, the head gets it from the target's checkpoint.
    vLLM ends with an error there."""
    embedding = getattr(draft_inner, "embed_tokens", None)
    has_own = getattr(draft, "has_own_embed_tokens", True)  # vLLM's word for who always has
    missing = isinstance(getattr(target_inner, "embed_tokens", None), PPMissingLayer)
    if embedding is None or has_own or not missing:
        share(draft, draft_inner, target_inner)
        return
    config = runner.vllm_config
    loader: Any = get_model_loader(config.load_config)
    if isinstance(loader, DummyModelLoader):
        return
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedError(
            f"--load-format {config.load_config.load_format}: {type(draft).__name__} needs the model's "
            "input embedding, which this format does not give apart from the other weights: take "
            "--load-format auto, or leave --speculative-config out"
        )
    for name, weight in loader.get_all_weights(config.model_config, runner.model):
        if name.endswith(EMBEDDING):
            embedding.weight.weight_loader(embedding.weight, weight)
            return
    raise UnsupportedError(
        f"--speculative-config: {type(draft).__name__} needs the model's input embedding, and none of "
        f'the model\'s weights is named {EMBEDDING}: take {{"method": "ngram"}}, or leave it out'
    )


def _of_one_stage(config: VllmConfig, speculative: Any) -> VllmConfig:
    """The configuration that a head is made with: vLLM's EAGLE models name their layer by the layers
    that this *stage* has, where it has several, and would take the name of one of the target's.

    The rank is that among the ranks of the stage. Compiled heads are kept by it, and each has the bounds
    of its part of the vocabulary built in."""
    made = copy.copy(config)
    made.parallel_config = copy.copy(config.parallel_config)
    made.parallel_config.pipeline_parallel_size = 1
    made.parallel_config.rank = get_tp_group().rank_in_group
    made.speculative_config = copy.copy(speculative)
    made.speculative_config.draft_parallel_config = copy.copy(speculative.draft_parallel_config)
    made.speculative_config.draft_parallel_config.pipeline_parallel_size = 1
    return made


@contextmanager
def _uncut() -> Iterator[None]:
    """While active, no cut of layers is set that vLLM would take for the head's, which is of one stage."""
    with patch.dict(os.environ):
        os.environ.pop(PARTITION, None)
        yield


@contextmanager
def hosted(runner: Any, speculator: Any) -> Iterator[None]:
    """While active, ``runner`` knows the speculator, if there is one: while memory is measured and the
    KV cache laid out. At all other times it would have it propose."""
    runner.speculator = speculator
    try:
        yield
    finally:
        runner.speculator = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBatch:
    """Requests and tokens that a head runs on, by the names of vLLM's ``InputBatch``: B requests, the
    shorter first, and T tokens."""

    num_reqs: int
    num_tokens: int
    num_tokens_after_padding: int
    num_scheduled_tokens: Any
    """[B] int32 array."""
    query_start_loc_np: Any
    """[B + 1] int32 array."""
    query_start_loc: torch.Tensor
    """[B + 1] int32."""
    seq_lens: torch.Tensor
    """[B] int32."""
    seq_lens_cpu_upper_bound: torch.Tensor
    """[B] int32, on the host."""
    idx_mapping: torch.Tensor
    """[B] int64: a request's row is its place."""
    input_ids: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    tables: Sequence[torch.Tensor]
    """[B, W] int32 block table of each KV cache group."""
    slots: torch.Tensor
    """[G, T] int64 slots of the KV cache."""
    decode_graph_eligible: bool = False


class BlockTablesOfBatch:
    """Block tables in the place of vLLM's: those of one :class:`HeadBatch`, by its rows.

    Invariant: no position has a slot behind those that its request may write to. A table may have
        another request's blocks there.
    """

    cp_size = 1
    cp_rank = 0
    cp_interleave = 1

    def __init__(self, block_sizes: Sequence[int], tokens: int, device: Any) -> None:
        """Make room for ``tokens`` tokens; ``block_sizes`` has a group's tokens a block."""
        self._block_sizes = list(block_sizes)
        self.num_kv_cache_groups = len(self._block_sizes)
        self.slot_mappings = torch.full(
            (self.num_kv_cache_groups, tokens), PAD_SLOT_ID, dtype=torch.int64, device=device
        )
        self.input_block_tables: Sequence[torch.Tensor] = ()
        self._ends = torch.zeros(0, dtype=torch.int32, device=device)

    def hold(self, batch: HeadBatch, more: int) -> None:
        """Be the tables of ``batch`` from now on, whose requests may write to ``more`` positions behind
        their tokens."""
        self.input_block_tables = batch.tables
        self.slot_mappings[:, : batch.num_tokens] = batch.slots
        self._ends = batch.seq_lens + more

    def compute_slot_mappings(
        self,
        _rows: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots [G, T] of the requests' tokens at ``positions`` [T], which lie by ``query_start_loc``
        [B + 1]; in place, as vLLM's, which graphs and metadata made before rely on."""
        slots = self.slot_mappings if out is None else out
        at = positions[:num_tokens]
        places = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=at.device)
        # Of tokens behind the last request's, which are padding, it is one too many.
        rows = torch.searchsorted(query_start_loc[1:], places, right=True)
        owned = rows < len(query_start_loc) - 1
        rows = rows.clamp(max=len(query_start_loc) - 2)
        owned &= at < self._ends[rows]
        for group, table in enumerate(self.input_block_tables):
            size = self._block_sizes[group]
            columns = (at // size).clamp(max=table.shape[1] - 1)
            blocks = table[rows, columns].long()
            slots[group, :num_tokens] = torch.where(owned, blocks * size + at % size, PAD_SLOT_ID)
        return slots[:, :num_tokens]


class Head:
    """vLLM's speculator with its attention set, on batches that are made here.

    It reads each token that the target has together with the one behind it, in the target's places.
    Of images and the like it reads the tokens that stand for them, as with vLLM's own stages: only the
    first stage has what the encoder has made of them.
    """

    def __init__(self, speculator: Any, runner: Any) -> None:
        self._speculator = speculator
        rows = int(runner.max_num_reqs)
        device = runner.device
        self.steps = int(speculator.num_speculative_steps)
        """Drafts of a request at most, k."""
        self._last_token = int(speculator.vocab_size) - 1
        self._tables = BlockTablesOfBatch(
            runner.block_tables.block_sizes, int(runner.max_num_tokens), device
        )
        speculator.block_tables = self._tables
        self._no_temperatures = torch.zeros(rows, device=device)
        self._no_seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._following = torch.zeros(rows, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def run(
        self,
        batch: HeadBatch,
        hidden: torch.Tensor,
        taps: list[torch.Tensor] | None,
        *,
        drawn: torch.Tensor,
        rejected: torch.Tensor,
        following: torch.Tensor,
        steps: int,
    ) -> torch.Tensor:
        """Run the head over ``batch``, and propose drafts.

        Args:
            hidden: [T, H] hidden states of the target, as its norm leaves them.
            taps: [T, H] of each layer that an EAGLE-3 head reads; None: it reads ``hidden``.
            drawn: [B] int32, tokens drawn of each request, 0 amid its prompt.
            rejected: [B] int32, drafts of it that were wrong.
            following: [B] int64, the token behind those that are right.
            steps: drafts to make, at most :attr:`steps`; 0: only what the head keeps is written.

        Returns [B, steps] int64, which the next call overwrites.
        """
        speculator = self._speculator
        count = batch.num_reqs
        # What stands for an image may be no token of the text's vocabulary.
        batch.input_ids.clamp_(0, self._last_token)
        self._following[:count] = following.clamp(0, self._last_token)
        self._tables.hold(batch, steps)
        longest = int(batch.seq_lens_cpu_upper_bound.max())
        speculator.draft_max_seq_len = min(longest + max(steps, 1), speculator.max_model_len)
        metadata, slots = self._attention(batch)
        drawing = nullcontext() if steps else patch.object(speculator, "sample_draft", _no_draft)
        with set_current_vllm_config(speculator.vllm_config), drawing:
            drafts: torch.Tensor = speculator.propose(
                batch,
                metadata,
                slots,
                hidden,
                taps,
                drawn,
                rejected,
                self._following,
                self._following,
                self._no_temperatures,
                self._no_seeds,
                num_speculative_tokens=steps,
            )
        return drafts[:, :steps]

    def _attention(self, batch: HeadBatch) -> tuple[Any, Any]:
        """Return the attention's metadata and slots of the head's first pass, by layer."""
        speculator = self._speculator
        count = batch.num_reqs
        tokens = batch.num_tokens
        buffers = speculator.input_buffers
        buffers.query_start_loc[: count + 1] = batch.query_start_loc
        buffers.seq_lens[:count] = batch.seq_lens
        buffers.positions[:tokens] = batch.positions
        description = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=tokens, num_reqs=count
        )
        metadata = speculator._build_attn_metadata(
            count,
            description,
            batch.query_start_loc_np,
            batch.seq_lens_cpu_upper_bound,
            0,
            slot_mappings=batch.slots,
        )
        return metadata, build_slot_mappings_by_layer(batch.slots, speculator.kv_cache_config)


class DraftModel(Head):
    """vLLM's speculator of a draft model of its own. It reads what the target has, and the token behind
    that in a place of its own, and makes its attention itself."""

    def _attention(self, batch: HeadBatch) -> tuple[Any, Any]:  # noqa: ARG002
        return {}, {}


def head_of_speculator(speculator: Any, runner: Any) -> Head:
    """Make the head that vLLM's ``speculator`` needs, beside the stage of ``runner``."""
    kind = DraftModel if speculator.speculative_config.uses_draft_model() else Head
    return kind(speculator, runner)


def _no_draft(hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Stand in the place of the speculator's ``sample_draft`` where the head only reads: vLLM would
    multiply by the output projection for the first draft of each request, of which none is wanted.

    Args:
        hidden: [B, H] hidden states of the head.

    Returns [B] int64.
    """
    return torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
