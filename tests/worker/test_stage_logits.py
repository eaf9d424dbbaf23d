"""Tensor-parallel ranks that each write their columns of the logits, in SiPipe's engine.

Greedy parity with stock vLLM at tp 2 is in ``test_parity.py``; the generated models' vocabulary is
no multiple of 64, so that the ranks' shards are uneven there as here.
"""

import pytest
from tests.engine import test_failures

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_killed_sampler_finds_the_columns_of_every_rank(models, tmp_path, monkeypatch):
    monkeypatch.setitem(test_failures.TWO_STAGES, "tensor_parallel_size", 2)
    test_failures.test_a_killed_sampler_is_replaced_and_no_token_changes(models, tmp_path)
