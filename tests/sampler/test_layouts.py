"""The same logits in other dtypes and widths give the same tokens."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from tests.sampler.support import bfloat16, from_bfloat16
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.layout import writeable
from sipipe.sampler.state import SequenceColumns
from sipipe.sampling import sample

V, B = 1537, 37
PARAMS = [
    SequenceParams(temperature=0.0),
    SequenceParams(seed=1),
    SequenceParams(top_k=9, repetition_penalty=1.3, seed=2),
    SequenceParams(top_p=0.9, frequency_penalty=0.2, seed=3),
    SequenceParams(min_p=0.1, seed=4),
    SequenceParams(top_k=1000, seed=5),
    SequenceParams(allowed_token_ids=[3, 4, 5, 1536], seed=6),
]


def matrix(dtype: str) -> np.ndarray:
    x = np.stack([logits("zipf", V, i) for i in range(B)])
    if dtype == "bfloat16":
        return bfloat16(x)
    return x.astype(np.float16) if dtype == "float16" else x


def joined() -> SequenceColumns:
    columns = SequenceColumns(V)
    for i in range(B):
        columns.join(i, PARAMS[i % len(PARAMS)], [i, 5, 6], [7, 7, i])
    return columns


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_widths_agree(dtype: str) -> None:
    x = matrix(dtype)
    columns = joined()
    words = np.full((2, -(-V // 32)), -1, np.int32)
    words[1, 5:] = 0
    masks = {"bitmask": words, "bitmask_rows": [(-1, 0, 1)[i % 3] for i in range(B)]}
    expected = columns.sample(range(B), x, **masks)
    assert not expected.errors
    assert all(expected.token_ids[i] < 160 for i in range(2, B, 3))
    wide = np.zeros((B, V + 100), x.dtype)
    wide[:, :V] = x
    wide[:, V:] = x.max()  # padding must not be drawn
    for name, given in (("padded", wide), ("sliced", wide[:, :V])):
        got = columns.sample(range(B), given, **masks)
        np.testing.assert_array_equal(got.token_ids, expected.token_ids, err_msg=name)
    some = np.random.default_rng(0).permutation(B)[:20]
    masks["bitmask_rows"] = [masks["bitmask_rows"][i] for i in some]
    got = columns.sample(some, x, some, **masks)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids[some])


def test_rows_in_another_order_than_in_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="rows in the order of memory"):
        joined().sample(range(B), np.zeros((B, V), np.float32)[::-1])


def test_rows_that_begin_within_an_element_are_refused() -> None:
    """A field of records may lie so: its rows would be read from the element before."""
    records = np.zeros(B, [("logits", np.float16, V), ("more", np.uint8)])
    with pytest.raises(ValueError, match="whole elements apart"):
        joined().sample(range(B), records["logits"])


def test_memory_that_may_only_be_read_stays_while_it_is_read() -> None:
    array = np.arange(5, dtype=np.int32)
    array.flags.writeable = False
    owner = weakref.ref(array)
    view = writeable(array)
    del array
    gc.collect()
    assert owner() is not None
    assert view.tolist() == [0, 1, 2, 3, 4]


def test_nobody_to_draw_for() -> None:
    assert joined().sample([], np.zeros((0, V), np.float32)).token_ids.shape == (0,)


def test_bfloat16_draws_as_its_float32_values() -> None:
    bits = matrix("bfloat16")
    np.testing.assert_array_equal(
        joined().sample(range(B), bits).token_ids,
        joined().sample(range(B), from_bfloat16(bits)).token_ids,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(matrix("float32")).to(getattr(torch, dtype))
    array = tensor.float().numpy()
    params = [PARAMS[i % len(PARAMS)] for i in range(B)]
    np.testing.assert_array_equal(sample(tensor, params), sample(array, params))
