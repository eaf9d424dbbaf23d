"""Column-wise CPU sampling with vLLM's semantics, at memory speed (the paper's CPU sampling).

`sample` and `sample_with_logprobs` keep nothing; `SequenceColumns` keeps a sampler's sequences from
iteration to iteration. No vLLM and no torch is needed.
"""

from sipipe.sampling.columns import SequenceColumns
from sipipe.sampling.cost import cost_estimate
from sipipe.sampling.facade import sample, sample_with_logprobs
from sipipe.sampling.kernels.philox import derive_seed
from sipipe.sampling.params import SequenceParams, unsupported
from sipipe.sampling.results import Logprobs, SampleResult
from sipipe.sampling.warmup import warm_up

__all__ = [
    "Logprobs",
    "SampleResult",
    "SequenceColumns",
    "SequenceParams",
    "cost_estimate",
    "derive_seed",
    "sample",
    "sample_with_logprobs",
    "unsupported",
    "warm_up",
]
