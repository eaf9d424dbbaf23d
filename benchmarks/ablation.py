"""SiPipe's stages less one part, for the ablation: extensions of vLLM's worker.

    sipipe serve MODEL --pp 2 --worker-extension-cls benchmarks.ablation.WithoutPosting

vLLM imports a worker's extension before it makes the worker, so that the part is gone when the
stage is opened. A class of several parts has all their names: ``WithoutPostingOverlap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender


def _posting() -> None:
    """Structure-aware transmission: the description of hidden states goes with each microbatch,
    memory is made when it has come, and the sender waits until they have left."""
    send, take = Sender.send, Receiver.take

    def described(self: Sender, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        self._schemas.clear()
        self._schema = None
        send(self, *args, timeout=timeout, **kwargs)
        self.flush(timeout)

    def copied(self: Receiver, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: tensor.clone() for key, tensor in take(self, *args, **kwargs).items()}

    Sender.send, Receiver.take = described, copied  # type: ignore[method-assign, assignment]


def _overlap() -> None:
    """Token-safe execution: one set of input buffers, so that a stage prepares and runs in turn."""
    from sipipe.worker import sampled_stage

    sampled_stage.SETS = 1


PARTS: dict[str, Callable[[], None]] = {"Posting": _posting, "Overlap": _overlap}
"""What each part is, and what takes it away in this process."""
AWAY: set[str] = set()
"""What has been taken away in this process."""


def extension(parts: list[str]) -> list[str]:
    """The option that takes these parts away."""
    assert set(parts) <= PARTS.keys(), parts
    return ["--worker-extension-cls", f"{__name__}.Without{''.join(parts)}"] if parts else []


def __getattr__(name: str) -> type:
    if not name.startswith("Without"):
        raise AttributeError(name)
    for part, take_away in PARTS.items():
        if part in name:
            take_away()
            AWAY.add(part)
    return type(name, (), {})
