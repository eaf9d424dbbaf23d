"""Load of a deployment: lengths, latency budget, limits, sampling."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A steady stream of requests."""

    input: int = 1000
    """Prompt tokens of a request (mean), and those generated for it."""
    output: int = 300
    tpot_slo: float = math.inf
    """Upper bound of the mean time per output token, seconds."""
    max_num_seqs: int = 1024
    """Sequences running at once, over all microbatches."""
    max_num_batched_tokens: int = 8192
    """Tokens of one microbatch, prompt chunks included."""
    sampling: str = "greedy"
    """A name that :func:`sipipe.tools.planner.hardware.sampling` takes."""
    memory_utilization: float = 0.9
    """Share of device memory that weights, workspace and KV cache may take."""
    kv_element_bytes: float | None = None
    """Bytes per cached element; None: as the activations."""
    fixed_batch: int | None = None
    """Run exactly this many sequences instead of searching for the best number."""
    min_kv_tokens: int = 0
    """Tokens that the KV cache has to hold at least."""
    weight_bits: float | None = None
    """Bits per weight; None: the checkpoint's own."""
    drafts: int = 0
    """Drafts that a head on the last stage makes of each sequence in each iteration."""
    acceptance: float = 0.0
    """Probability that a draft is right if those before it are."""

    @property
    def context(self) -> float:
        """Mean cached tokens of a running sequence, half-way through its output."""
        return self.input + self.output / 2

    @property
    def longest(self) -> int:
        """Cached tokens of a sequence at its end."""
        return self.input + self.output

    @property
    def tokens_per_sequence(self) -> float:
        """Tokens an iteration computes per running sequence: its own, its drafts, and its share of the
        prompts that have to enter for the batch to stay full."""
        return 1 + self.drafts + self.tokens_a_pass * self.input / self.output

    @property
    def tokens_a_pass(self) -> float:
        """Tokens that a sequence gets in an iteration, more than one with drafts: a draft counts if
        all before it are right, and the token behind the last right one always does."""
        return math.fsum(self.acceptance**number for number in range(1 + self.drafts))

    def microbatch(self, batch: int) -> Microbatch:
        """The steady microbatch of ``batch`` running sequences."""
        return Microbatch(
            batch=batch,
            tokens=batch * self.tokens_per_sequence,
            context=self.context,
            prompt_context=self.input / 2,
            drafts=self.drafts,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Work of one iteration."""

    batch: int
    """Sequences that draw a token."""
    tokens: float
    """Tokens computed: one per sequence, its drafts, and prompt tokens."""
    context: float
    """Mean cached tokens that a sequence's token attends to, and a prompt token."""
    prompt_context: float = 0.0
    drafts: int = 0
    """Drafts of each sequence."""

    @property
    def rows(self) -> int:
        """Tokens that have logits: of each sequence its own, and its drafts."""
        return self.batch * (1 + self.drafts)
