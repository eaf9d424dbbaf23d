"""Settings say in one line what is wrong with them."""

from __future__ import annotations

import pytest

from sipipe.errors import ConfigError
from sipipe.slot_settings import SlotSettings


def test_missing_keys_keep_their_default():
    assert SlotSettings.from_mapping(None) == SlotSettings()
    assert SlotSettings.from_mapping({"max_moves": 2}) == SlotSettings(max_moves=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([1], "must be an object"),
        ({"moves": 1}, 'unknown key "microbatches.moves"'),
        ({"max_moves": -1}, '"microbatches.max_moves" must be a whole number of 0 or more'),
        ({"min_sequences": -1}, '"microbatches.min_sequences" must be'),
        ({"prefill_spread": 1.5}, '"microbatches.prefill_spread" must be'),
        ({"max_moves": True}, '"microbatches.max_moves" must be'),
        ({"kv_reserve": 1}, '"microbatches.kv_reserve" must be a number from 0 to below 1'),
        ({"kv_reserve": "x"}, '"microbatches.kv_reserve" must be'),
    ],
)
def test_a_bad_value_is_named(settings, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as error:
        SlotSettings.from_mapping(settings)
    assert "\n" not in str(error.value)
