"""What ``"cpu_sampling": "auto"`` measures at start, in workers and samplers."""

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
"""How often each thing is measured, after once that does not count; the median is taken."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds that one microbatch takes a worker."""

    layers: float
    """Its stage's layers."""
    projection: float = 0.0
    """Last stage: its columns of the logits."""
    device: Mapping[str, float] = field(default_factory=dict)
    """Last stage: the logits, gathered, and vLLM's sampler, for each of :data:`MIXES`."""
    plain: Mapping[str, float] = field(default_factory=dict)
    """Last stage: its columns, gathered, and the kernel that draws rows of no more than a
    temperature, for each of :data:`MIXES` that is of such rows."""
    copy: float = 0.0
    """Its logits into their BIC-L entry, where it writes any."""
    copied: int = 0
    """Bytes of them."""
