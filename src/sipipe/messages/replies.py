"""Messages of a child to the engine through its control pipe, and the one question that it is asked.

Everything else that an engine tells a running child travels on BIC-I, in order with iterations, but
for requests for drafts (:mod:`sipipe.messages.drafts`).
A child that fails sends the exception itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

ASK_STATUS = b"what are you doing"
"""The question, sent as it is, not pickled. The answer is a :class:`Status`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its model; a sampler has opened its channels."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a sampler's rows took, for each mix of parameters, where it was asked to measure."""


@dataclass(frozen=True, slots=True)
class Status:
    """The work of a child at this moment."""

    doing: str
    """The predicate of a sentence whose subject is the child, for messages."""


@dataclass(frozen=True, slots=True)
class Warm:
    """A spare sampler has compiled, and could take a place."""


@dataclass(frozen=True, slots=True)
class Replacing:
    """The host of a sampler that has died starts its successor."""


@dataclass(frozen=True, slots=True)
class Trying:
    """A sampler that has taken another's place adds or draws one request alone. If it dies of it,
    or hangs, the engine knows of which."""

    handle: int | None
    """The request; None: the sampler is done with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A worker's answer to a CONTROL call."""

    call: int
    value: bytes = b""
    """The result, pickled apart: one that cannot be read is an error of this call only."""
    error: str | None = None
    """Text of the exception that the call has raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """The last stage has run an iteration for which the engine waits for its word."""

    iteration: int
    output: ModelRunnerOutput | None = None
    """The whole output, where vLLM's sampler draws; None: the fields below have what there is."""
    prompt_logprobs: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's ``LogprobsTensors`` by request id, of prompts that are complete now."""
    prompt_scores: Mapping[str, Any] = field(default_factory=dict)
    """Logprobs of ``prompt_logprob_token_ids`` of such prompts, one tensor a request."""
    tokens: Sequence[int] = ()
    """Tokens drawn on the device, in the order of its rows."""
    drafts: Mapping[str, list[int]] = field(default_factory=dict)
    """Drafts by request that a head has proposed in the same pass, behind the tokens of ``output``. Those
    of a request amid its prompt have no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """One worker's KV connector has done its part of an iteration."""

    iteration: int
    rank: int
    output: KVConnectorOutput | None
    """Blocks that were sent, received, or failed; None: none."""
