"""Sizes of a language model, by which the layers are cut and from which the planner predicts."""

import dataclasses
import math
from typing import Literal

from sipipe.engine.layers.bonds import Bond


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer: grouped-query (``"gqa"``) or multi-head latent (``"mla"``)."""

    kind: Literal["gqa", "mla"]
    heads: int
    kv_heads: int
    """Key and value heads; for MLA 1, because one latent serves every head."""
    head_dim: int
    """Elements per query and key head (for MLA the part without rotary position)."""
    parameters: int
    """Weights of the projections, biases and norms of one layer."""
    kv_rank: int = 0
    """MLA: elements of the compressed key-value latent."""
    rope_dim: int = 0
    """MLA: elements of the shared rotary key."""
    value_dim: int = 0
    """MLA: elements per value head."""

    @property
    def kv_elements(self) -> int:
        """Elements that one token keeps in one layer's cache, over all ranks and without copies."""
        if self.kind == "mla":
            return self.kv_rank + self.rope_dim
        return 2 * self.kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """One sparse feed-forward layer."""

    experts: int
    chosen: int
    """Routed experts that one token uses."""
    expert_parameters: int
    """Weights of one routed expert."""
    shared_parameters: int
    """Weights that every token uses: shared experts and the router."""

    @property
    def parameters(self) -> int:
        """All weights of the layer."""
        return self.experts * self.expert_parameters + self.shared_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with."""
        return self.chosen * self.expert_parameters + self.shared_parameters

    def touched(self, tokens: float) -> float:
        """Expected number of distinct experts that ``tokens`` tokens reach, with uniform routing."""
        missed = math.pow(1.0 - self.chosen / self.experts, tokens)
        return self.experts * (1.0 - missed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of one decoder-only transformer."""

    name: str
    """Repository on the Hugging Face hub, or a path."""
    layers: int
    hidden: int
    vocabulary: int
    attention: Attention
    dense_parameters: int
    """Weights of one dense feed-forward layer; 0 where no layer is dense."""
    moe: MixtureOfExperts | None
    """The sparse feed-forward layer; None for a dense model."""
    sparse_layers: frozenset[int]
    """Indices of the layers that are sparse."""
    tied_embeddings: bool
    """True if the input embedding is also the output projection."""
    intermediate: int
    """Columns of the narrowest feed-forward projection that tensor parallelism splits."""
    weight_bytes: float = 2.0
    """Bytes per weight of the transformer layers (1 for FP8, about 0.5 for 4-bit)."""
    arithmetic_bits: int = 16
    """Width of the layers' products, where the device has units for it: 8 for FP8 checkpoints, 4
    for FP4. Checkpoints that only store narrow weights (AWQ, GPTQ, MXFP4) compute in 16."""
    activation_bytes: int = 2
    """Bytes per element of activations, embeddings and the output projection."""
    block: int = 1
    """Columns per quantization block; a tensor-parallel shard must hold whole blocks."""
    context_length: int = 0
    """Longest sequence the model takes; 0: not stated."""
    source: str = "config.json"
    bonds: tuple[Bond, ...] = ()
    """Layers that have to be on one stage."""

    @property
    def embedding_parameters(self) -> int:
        """Weights of the input embedding (as many as of the output projection)."""
        return self.vocabulary * self.hidden

    def layer_parameters(self, layer: int) -> int:
        """All weights of one layer, its two norms among them."""
        sparse = self.moe if layer in self.sparse_layers else None
        feed_forward = sparse.parameters if sparse else self.dense_parameters
        return self.attention.parameters + feed_forward + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        ends = self.embedding_parameters * (1 if self.tied_embeddings else 2) + self.hidden
        return ends + sum(self.layer_parameters(layer) for layer in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets, by the usual count that includes both embeddings."""
        if self.moe is None:
            return self.parameters
        idle = self.moe.parameters - self.moe.active_parameters
        return self.parameters - idle * len(self.sparse_layers)
