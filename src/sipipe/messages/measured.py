"""Times that ``"cpu_sampling": "auto"`` measures at start, in workers and samplers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
}
"""Ways of sampling by name, from the cheapest to every strategy at once."""

TIMES = 5
"""Number of measurements, after one that does not count; their median is taken."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds that one microbatch takes in a worker."""

    layers: float
    """Time of its stage's layers."""
    projection: float = 0.0
    """Time of its columns of the logits, on the last stage."""
    device: Mapping[str, float] = field(default_factory=dict)
    """Time of gathering the logits and of vLLM's sampler, on the last stage, for each of :data:`MIXES`."""
    plain: Mapping[str, float] = field(default_factory=dict)
    """Time of gathering its columns and of the kernel that draws rows of no more than a temperature, on
    the last stage, for each of :data:`MIXES` that has such rows."""
    head: float | None = None
    """Time of its draft head's passes, on the last stage; None: it has no head, or it failed."""
    copy: float = 0.0
    """Time of copying its logits into BIC-L, where it writes any."""
    copied: int = 0
    """Bytes of these logits."""
