"""Result of drawing tokens for rows of logits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sipipe.sampler.kernels.state import ALL_MASKED, HAS_INFINITY, HAS_NAN

_MESSAGES = {
    HAS_NAN: "the model's logits hold NaN",
    HAS_INFINITY: "a logit is +inf: the model's, or with the request's biases and penalties",
    ALL_MASKED: "no token is left to sample: every logit is -inf or masked",
}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """A row as in vLLM's ``LogprobsTensors``: the drawn token first, then the most likely ones."""

    token_ids: npt.NDArray[np.int32]
    """[1 + logprobs asked for]."""
    logprobs: npt.NDArray[np.float32]
    """Same shape: natural logarithms (or logits, by mode), -inf for masked tokens."""
    rank: int
    """Number of tokens that score at least as much as the drawn one, itself included."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Result of `SequenceColumns.sample`, per row of the call."""

    token_ids: npt.NDArray[np.int32]
    """[n], -1 where there is an error, `NOT_DRAWN` behind a draft that was not drawn."""
    codes: npt.NDArray[np.uint8]
    """[n], 0: drawn, else why not; see `errors`."""
    logprobs: dict[int, Logprobs]
    """{row of the call: its logprobs}, for sequences that asked for any and got a token."""

    @property
    def errors(self) -> dict[int, str]:
        """{row of the call: what is wrong with it}; empty when every token was drawn."""
        return {int(i): _MESSAGES[int(self.codes[i])] for i in np.flatnonzero(self.codes)}
