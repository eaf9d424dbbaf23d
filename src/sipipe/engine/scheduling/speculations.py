"""The kinds of speculative decoding, of which an engine has one.

Who runs here: the engine's thread, as it makes its scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sipipe.engine.scheduling.ahead_speculation import AheadSpeculation
from sipipe.engine.scheduling.speculation import HeadSpeculation, NoSpeculation, Speculation
from sipipe.engine.setup.derived import settings_of

if TYPE_CHECKING:
    from sipipe.engine.scheduling.concurrency import ConcurrencyController


def speculation(scheduler: Any, controller: ConcurrencyController | None) -> NoSpeculation:
    """The kind of speculation that the engine of ``scheduler`` has."""
    if not scheduler.rows:
        return NoSpeculation()
    kind: type[Speculation] = Speculation
    if scheduler.head_drafts is not None:
        kind = HeadSpeculation
    elif getattr(scheduler, "ahead", 0):
        kind = AheadSpeculation
    target = settings_of(scheduler.vllm_config).microbatches.tpot_target_ms / 1e3
    return kind(scheduler, controller, target)
