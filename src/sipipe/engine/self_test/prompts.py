"""Prompts of the self-test, and what a model says to them: once through stages, once in one stage.

A prompt is answered greedily, with the scores of the whole vocabulary at each token: a stage that
misses a tensor changes all of them, while tokens alone may be the same by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

TEXTS = (
    "The three primary colours are red, yellow and",
    "Water boils at a hundred degrees, and it freezes at",
    "She opened the letter, read it twice, and then",
    "for i in range(10):\n    print(",
)
LONGEST = 24
"""Tokens of a prompt at most: enough for attention to reach back, few enough to cost nothing."""
TOKENS = 3
"""Tokens of an answer: the first follows a prompt's pass, the others a pass of one token."""
_STEPS = 4 * (LONGEST + TOKENS)
"""Passes of a prompt at most. Fewer are needed even where each has one token."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One token of an answer."""

    token: int
    scores: npt.NDArray[np.float32]
    """Logits or log-probabilities, by token id; NaN where there is none."""


Answers = list[list[Position]]
"""Positions of each prompt's answer."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Prompts, and what one stage with all layers says to them."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    answers: Answers


class SilentError(Exception):
    """No answer where one was due; says of what."""


def make_prompts(tokenizer: TokenizerLike, max_model_len: int) -> list[list[int]]:
    """Token ids of the prompts, which leave room for an answer in requests of ``max_model_len``
    tokens. Raises SilentError: the tokenizer makes none."""
    most = min(LONGEST, max_model_len - TOKENS)
    prompts = [list(tokenizer.encode(text))[:most] for text in TEXTS]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise SilentError("the tokenizer makes no tokens of a text")
    return prompts


def make_requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """A request for each prompt of token ids. Their names are such that requests that come later
    draw what they would draw without them (:mod:`sipipe.engine.iteration.request_names`)."""
    return [
        Request(
            request_id=f"self-test {index}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=-1, detokenize=False
            ),
            pooling_params=None,
        )
        for index, prompt in enumerate(prompts)
    ]


def answer(
    requests: Sequence[Request],
    vocabulary: int,
    add: Callable[[Request], None],
    step: Callable[[], Iterable[EngineCoreOutputs]],
) -> Answers:
    """The answers to ``requests``: ``add`` gives one to a scheduler, and ``step`` makes a pass of it.

    They are asked one after the other. What some kernels compute for a request depends on the others
    of its batch (vLLM's MLA on CPUs), and stages have other batches than one stage.

    Args:
        requests: of :func:`make_requests`.
        vocabulary: token ids that the model has.
        add: has the scheduler take a request.
        step: makes a pass and returns what came of it.

    Raises:
        SilentError: an answer does not come.
    """
    return [_answer_to(request, vocabulary, add, step) for request in requests]


def _answer_to(
    request: Request,
    vocabulary: int,
    add: Callable[[Request], None],
    step: Callable[[], Iterable[EngineCoreOutputs]],
) -> list[Position]:
    add(request)
    positions: list[Position] = []
    has_ended = False
    for _ in range(_STEPS):
        for outputs in step():
            for output in outputs.outputs:
                positions += _positions(output, vocabulary)
                has_ended = has_ended or output.finish_reason is not None
        if has_ended:
            break
    if not has_ended or len(positions) != TOKENS:
        raise SilentError("a prompt has no answer")
    return positions


def _positions(output: object, vocabulary: int) -> list[Position]:
    logprobs = output.new_logprobs  # type: ignore[attr-defined]
    positions = []
    for index, token in enumerate(output.new_token_ids):  # type: ignore[attr-defined]
        if logprobs is None:
            raise SilentError("an answer has no scores")
        ids = np.asarray(logprobs.logprob_token_ids[index])
        values = np.asarray(logprobs.logprobs[index], dtype=np.float32)
        known = (ids >= 0) & (ids < vocabulary)
        scores = np.full(vocabulary, np.nan, dtype=np.float32)
        scores[ids[known]] = values[known]
        positions.append(Position(token=int(token), scores=scores))
    return positions
