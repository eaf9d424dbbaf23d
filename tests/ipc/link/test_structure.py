"""What is captured, what is recognized, how a slot is laid out."""

from __future__ import annotations

import pytest
import torch

from sipipe.ipc.link.arena import HostArena, slot_bytes
from sipipe.ipc.link.structure import ALIGNMENT, TOKENS, Structure


def tensors(num_tokens: int, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.zeros(num_tokens, 6, dtype=torch.bfloat16), **extra}


def test_the_token_dimension_is_the_first_that_fits():
    structure = Structure.capture(
        tensors(5, positions=torch.zeros(3, 5), square=torch.zeros(5, 5), fixed=torch.zeros(2)), 5
    )
    assert [spec.shape for spec in structure.specs] == [(TOKENS, 6), (3, TOKENS), (TOKENS, 5), (2,)]
    assert [spec.dtype for spec in structure.specs] == ["bfloat16", "float32", "float32", "float32"]


def test_only_the_number_of_tokens_may_differ():
    structure = Structure.capture(tensors(5), 5)
    assert structure.matches(tensors(9), 9)
    assert not structure.matches(tensors(9), 8)
    assert not structure.matches(tensors(9, residual=torch.zeros(9, 6)), 9)
    assert not structure.matches({"hidden": torch.zeros(9, 6, dtype=torch.bfloat16)}, 9)
    assert not structure.matches({"hidden_states": torch.zeros(9, 6)}, 9)
    assert not structure.matches({"hidden_states": torch.zeros(9, 7, dtype=torch.bfloat16)}, 9)


def test_encoding_keeps_the_fingerprint():
    structure = Structure.capture(tensors(5, fixed=torch.zeros(2)), 5, shards=2)
    again = Structure.decode(structure.encode())
    assert again == structure
    assert again.fingerprint == structure.fingerprint
    assert Structure.capture(tensors(5), 5).fingerprint != structure.fingerprint


def test_only_what_divides_evenly_is_sharded():
    structure = Structure.capture(
        tensors(4, odd=torch.zeros(4, 3), kept=torch.zeros(4, 8), scalar=torch.tensor(1.0)),
        4,
        shards=2,
        whole=frozenset({"kept"}),
    )
    assert [spec.shards for spec in structure.specs] == [2, 1, 1, 1]
    assert structure.nbytes(4) == 4 * 6 * 2 // 2 + 4 * 3 * 4 + 4 * 8 * 4 + 4


def test_addresses_do_not_depend_on_the_number_of_tokens():
    structure = Structure.capture(tensors(5, residual=torch.zeros(5, 6)), 5)
    arena = HostArena.private(2, slot_bytes(structure, 10), 10)
    for slot in range(2):
        few, many = (arena.views(structure, slot, count) for count in (1, 10))
        assert [t.data_ptr() for t in few] == [t.data_ptr() for t in many]
        assert all(t.data_ptr() % ALIGNMENT == 0 for t in many)
    first, second = (arena.views(structure, slot, 10) for slot in range(2))
    first[1].fill_(7)
    second[0].fill_(9)
    assert first[0].abs().max() == 0
    assert second[1].abs().max() == 0


def test_a_hint_makes_room_for_more_than_the_first_structure():
    structure = Structure.capture(tensors(5), 5)
    assert slot_bytes(structure, 100) < slot_bytes(structure, 100, hint=4096)


@pytest.mark.parametrize("value", [3, "x", None, [1]])
def test_only_tensors_travel(value):
    with pytest.raises(TypeError, match="'residual'"):
        Structure.capture(tensors(5, residual=value), 5)
