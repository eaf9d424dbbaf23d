"""All steps together against vLLM's own sampler functions (no engine is started)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.sampler.support import processed
from tests.sampler.test_filters import SHAPES, kept_equal, logits

from sipipe.messages.params import SequenceParams

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def steps():
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.utils import apply_penalties
    from vllm.v1.sample.ops.bad_words import apply_bad_words
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_penalties, apply_bad_words, apply_top_k_top_p_pytorch


def by_vllm(steps, x: np.ndarray, p: SequenceParams, prompt: list, output: list) -> np.ndarray:
    """The order of vllm.v1.sample.sampler.Sampler, with its functions; [V] processed logits."""
    import torch

    apply_penalties, apply_bad_words, apply_top_k_top_p = steps
    t = torch.from_numpy(x.copy()).reshape(1, -1)
    if p.bad_words_token_ids:
        apply_bad_words(t, {0: p.bad_words_token_ids}, [output])
    for token, bias in (p.logit_bias or {}).items():
        t[0, token] += bias
    scalar = lambda value: torch.tensor([value], dtype=torch.float32)  # noqa: E731
    t = apply_penalties(
        t,
        torch.tensor([prompt], dtype=torch.long),
        torch.tensor([output], dtype=torch.long),
        scalar(p.presence_penalty),
        scalar(p.frequency_penalty),
        scalar(p.repetition_penalty),
    )
    t = t.div_(scalar(p.temperature).unsqueeze(1))
    if p.min_p:
        probabilities = t.softmax(-1)
        t = t.masked_fill(probabilities < probabilities.amax(-1, True) * p.min_p, -np.inf)
    k = p.top_k if 0 < p.top_k < x.size else x.size
    t = apply_top_k_top_p(
        t,
        torch.tensor([k], dtype=torch.int32) if p.top_k else None,
        scalar(p.top_p) if p.top_p < 1 else None,
        allow_cpu_sync=True,
    )
    return t[0].numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [64, 300, 5000, 151_936])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": 40},
        {"top_k": 40, "min_p": 0.02},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
        {"logit_bias": {5: 3.0, 9: -math.inf}, "bad_words_token_ids": [[6], [2, 3]]},
    ],
    ids=str,
)
def test_all_together(steps, shape: str, size: int, given: dict) -> None:
    x = logits(shape, size)
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, size, 50).tolist(), [*rng.integers(0, size, 30).tolist(), 2]
    params = SequenceParams(
        temperature=0.8,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        **given,
    )
    theirs = by_vllm(steps, x, params, prompt, output)
    ours = processed(x, params, prompt_token_ids=prompt, output_token_ids=output)
    if params.top_p < 1 and shape in ("tied", "flat"):
        # Their float32 running sum decides: as many tokens, within its rounding.
        kept, other = np.isfinite(ours).sum(), np.isfinite(theirs).sum()
        assert abs(int(kept) - int(other)) <= max(1, other // 500)
    else:
        kept_equal(ours, theirs, tolerance=2e-3 if params.top_p < 1 else 1e-5)


def test_parameters_of_a_request() -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    source = SamplingParams(
        temperature=0.5, top_k=7, seed=3, logit_bias={4: 2.0}, min_tokens=2, stop_token_ids=[9]
    )
    assert SequenceParams.of(source) == SequenceParams(
        temperature=0.5,
        top_k=7,
        seed=3,
        logit_bias={4: 2.0},
        min_tokens=2,
        all_stop_token_ids=[9],
    )
