"""What is captured, what is recognized, how a buffer is laid out."""

from __future__ import annotations

import torch

from sipipe.ipc.link.schema import ALIGNMENT, TOKENS, Buffers, TensorSchema, buffer_bytes


def tensors(num_tokens: int, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.zeros(num_tokens, 6, dtype=torch.bfloat16), **extra}


def test_the_token_dimension_is_the_first_that_fits():
    schema = TensorSchema.capture(
        tensors(5, positions=torch.zeros(3, 5), square=torch.zeros(5, 5), fixed=torch.zeros(2)), 5
    )
    assert [spec.shape for spec in schema.specs] == [(TOKENS, 6), (3, TOKENS), (TOKENS, 5), (2,)]
    assert [spec.dtype for spec in schema.specs] == ["bfloat16", "float32", "float32", "float32"]


def test_only_the_number_of_tokens_may_differ():
    schema = TensorSchema.capture(tensors(5), 5)
    nine = tensors(9)
    assert schema.parts(nine, 9) == [nine["hidden_states"]]
    assert schema.parts(nine, 8) is None
    assert schema.parts(tensors(9, residual=torch.zeros(9, 6)), 9) is None
    assert schema.parts({"hidden": torch.zeros(9, 6, dtype=torch.bfloat16)}, 9) is None
    assert schema.parts({"hidden_states": torch.zeros(9, 6)}, 9) is None
    assert schema.parts({"hidden_states": torch.zeros(9, 7, dtype=torch.bfloat16)}, 9) is None


def test_parts_come_in_the_order_of_the_schema():
    schema = TensorSchema.capture(tensors(5, residual=torch.zeros(5, 6)), 5)
    sent = dict(reversed(tensors(3, residual=torch.ones(3, 6)).items()))
    parts = schema.parts(sent, 3)
    assert parts is not None
    assert [part.data_ptr() for part in parts] == [
        sent[key].data_ptr() for key in ("hidden_states", "residual")
    ]


def test_addresses_do_not_depend_on_the_number_of_tokens():
    schema = TensorSchema.capture(tensors(5, residual=torch.zeros(5, 6)), 5)
    size = buffer_bytes(schema, 10)
    memory = torch.zeros(2 * size + ALIGNMENT, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % ALIGNMENT :]
    buffers = Buffers(memory, size, 10)
    for buffer in range(2):
        few, many = (buffers.views(schema, buffer, count) for count in (1, 10))
        addresses = [tensor.data_ptr() for tensor in many.values()]
        assert [tensor.data_ptr() for tensor in few.values()] == addresses
        assert all(address % ALIGNMENT == 0 for address in addresses)
    first, second = (buffers.views(schema, buffer, 10) for buffer in range(2))
    first["residual"].fill_(7)
    second["hidden_states"].fill_(9)
    assert first["hidden_states"].abs().max() == 0
    assert second["residual"].abs().max() == 0
