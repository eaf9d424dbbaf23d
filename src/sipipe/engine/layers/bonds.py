"""Decoder layers that have to be on one stage.

A stage keeps what its own layers compute. Three kinds of models have layers that read what another
layer of the same stage has left, and that does not travel between stages:

- layers that read an earlier layer's KV cache (Gemma 4, Gemma 3n: ``num_kv_shared_layers``),
- first layers to which an image's features are added (deepstack: ``deepstack_visual_indexes``), which
  only the first stage has,
- layers that attend to the tokens which an earlier layer's index chose (DeepSeek's sparse attention:
  ``index_topk_freq``, ``index_topk_pattern``).

Each is read from the fields by which vLLM's models decide it themselves. A field of a wrong type is as
one that is not there: vLLM refuses the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Bond:
    """Layers ``first`` to ``last``, counted from 0, which have to be on one stage."""

    first: int
    last: int
    why: str
    """Clause that says what joins them, for messages."""

    def __str__(self) -> str:
        return f"layers {self.first} to {self.last} ({self.why})"


def bonds_of(text: Mapping[str, Any], vision: Mapping[str, Any]) -> tuple[Bond, ...]:
    """The bonds of a model, by the fields of its text's and its vision's configuration."""
    total = text.get("num_hidden_layers")
    if not isinstance(total, int):
        return ()
    bonds = [*_shared_caches(text, total), *_deepstack(vision), *_shared_index(text, total)]
    return tuple(bond for bond in bonds if bond.first < bond.last < total)


def _shared_caches(text: Mapping[str, Any], total: int) -> list[Bond]:
    """The bond from the first layer whose KV cache is read to the last one that reads it. Each of the
    last ``num_kv_shared_layers`` reads the last layer before them that is of its own kind."""
    shared = _whole(text, "num_kv_shared_layers", 0)
    kinds = text.get("layer_types")
    if not shared or not isinstance(kinds, Sequence) or not 0 < shared < total == len(kinds):
        return []
    owners = kinds[: total - shared]
    readers = range(total - shared, total)
    joined = [
        (len(owners) - 1 - owners[::-1].index(kinds[reader]), reader)
        for reader in readers
        if kinds[reader] in owners
    ]
    if not joined:
        return []
    first = min(owner for owner, _ in joined)
    last = max(reader for _, reader in joined)
    return [Bond(first, last, "later ones read earlier ones' KV cache")]


def _deepstack(vision: Mapping[str, Any]) -> list[Bond]:
    """The bond of the first layers, to each of which an image's features of one level are added."""
    levels = vision.get("deepstack_visual_indexes")
    if not isinstance(levels, list | tuple) or not levels:
        return []
    return [Bond(0, len(levels) - 1, "images' features are added to each")]


def _shared_index(text: Mapping[str, Any], total: int) -> list[Bond]:
    """A bond for each layer with an index of its own, and the layers behind it that use it."""
    if text.get("index_topk") is None:
        return []
    pattern = text.get("index_topk_pattern")
    every = _whole(text, "index_topk_freq", 1) or 1
    offset = _whole(text, "index_skip_topk_offset", 2)
    if not isinstance(pattern, Sequence):
        uses = [max(layer - offset + 1, 0) % every != 0 for layer in range(total)]
    else:
        uses = [layer < len(pattern) and pattern[layer] == "S" for layer in range(total)]
    owners = [layer for layer in range(total) if not uses[layer]] or [0]
    ends = [*(layer - 1 for layer in owners[1:]), total - 1]
    return [
        Bond(first, last, "later ones use the first one's index of tokens")
        for first, last in zip(owners, ends, strict=True)
    ]


def _whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number among a configuration's fields; ``default`` where it has none."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def broken(bonds: Sequence[Bond], layers: Sequence[int]) -> Bond | None:
    """The first bond that a cut into ``layers`` breaks, or None."""
    starts = list(accumulate(layers))[:-1]
    return next(
        (bond for bond in bonds if any(bond.first < start <= bond.last for start in starts)), None
    )


def boundaries(bonds: Sequence[Bond], total: int) -> list[int]:
    """Layers, counted from 0, at which a stage but the first may begin."""
    return [
        start
        for start in range(1, total)
        if not any(bond.first < start <= bond.last for bond in bonds)
    ]
