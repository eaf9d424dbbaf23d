"""Choice of the stages that compute the output projection, and of each one's columns."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from vllm.config import VllmConfig

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.choose import choose_layers, device_kind
from sipipe.engine.layers.cut import (
    WORTH_SHARING,
    fill,
    layers_work,
    projection_times,
    share_projection,
)
from sipipe.engine.layers.decoder import Decoder
from sipipe.engine.setup.compatibility import device_may_draw
from sipipe.engine.setup.draft_head import head_of

_BLOCK = 64
"""Columns that stay together. vLLM pads its vocabulary to a multiple of them, and no kernel works on
more at a time."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Shares of the output projection."""

    parts: tuple[float, ...] = ()
    """Parts of the columns by stage, together 1; empty if the last stage has all."""
    why: str = ""
    """Reason for the parts, as a clause for messages; empty if there was no choice."""
    work: tuple[float, ...] = ()
    """Costs of each stage's layers, in any unit, where the projection is shared out."""

    def __str__(self) -> str:
        if not self.parts:
            return f"Output projection on the last stage: {self.why}" if self.why else ""
        parts = ", ".join(f"{part:.0%}" for part in self.parts)
        return f"Output projection shared out over the stages: {parts} of its columns ({self.why})"


def choose_vocabulary(
    vllm_config: VllmConfig, config: SiPipeConfig, decoder: Decoder, cut: tuple[int, ...]
) -> tuple[Vocabulary, tuple[int, ...]]:
    """Choose the shares of the output projection, and the layers of the stages that go with them, in an
    engine whose samplers draw. ``cut`` are the layers if the last stage has all of the projection."""
    if config.vocabulary == "last" or len(cut) == 1:
        return Vocabulary(), cut
    reason = _why_last(vllm_config, config)
    facts = decoder.facts
    if reason or facts is None:
        return Vocabulary(why=reason or "the sizes of the model's weights are not known"), cut
    even = choose_layers(vllm_config, config, decoder, by_cost=False)
    tp = vllm_config.parallel_config.tensor_parallel_size
    kind = device_kind()
    parts, gain = share_projection(facts, cut, even, tp, device=kind)
    if config.vocabulary == "auto" and gain < WORTH_SHARING:
        worth = f"only {gain - 1:.0%} of speed" if gain > 1.005 else "nothing"
        return Vocabulary(why=f"sharing it out over the stages would gain {worth}"), cut
    effect = f"the slowest stage {gain:.2f} x as quick with layers {even} as unshared with {cut}"
    shared = Vocabulary(
        parts=parts,
        why=f"expected to make {effect}",
        work=layers_work(facts, even, tp, kind),
    )
    return shared, even


def measured_vocabulary(
    expected: Vocabulary,
    config: SiPipeConfig,
    layers: Sequence[float],
    projection: float,
    *,
    reserved: bool = False,
) -> Vocabulary:
    """Choose the shares by measured times.

    Args:
        expected: the shares that were expected.
        config: SiPipe's settings.
        layers: seconds of each stage's layers for a microbatch of decoding sequences.
        projection: seconds of all of the output projection on the last stage.
        reserved: stages have memory for their expected parts, as on GPUs. No stage but the last gets
            a larger part then.
    """
    projections = projection_times(expected.work, layers, projection)
    parts, _ = fill(layers, projections)
    if reserved:
        bounded = [min(pair) for pair in zip(parts, expected.parts, strict=True)][:-1]
        parts = (*bounded, 1 - sum(bounded))
    shared = [
        seconds + part * all_columns
        for seconds, part, all_columns in zip(layers, parts, projections, strict=True)
    ]
    gain = max(*layers, layers[-1] + projection) / max(shared)
    reason = (
        f"{expected.why}; measured: layers {_ms(layers)}, all of the projection {_ms(projections)}, "
        f"the slowest stage {gain:.2f} x as quick shared as unshared with the same layers"
    )
    on_last = config.vocabulary == "auto" and gain < WORTH_SHARING
    return Vocabulary(parts=() if on_last else parts, why=reason, work=expected.work)


def _ms(times: Sequence[float]) -> str:
    """Seconds as text in milliseconds."""
    return ", ".join(f"{seconds * 1e3:.1f}" for seconds in times) + " ms"


def _why_last(vllm_config: VllmConfig, config: SiPipeConfig) -> str:
    """The reason for which the projection has to stay on the last stage, as a clause, by the
    configuration alone; empty if there is none."""
    if device_may_draw() and config.cpu_sampling != "on":
        return (
            f'"cpu_sampling" is "{config.cpu_sampling}", with which the last stage\'s device may '
            'draw; it is shared out with "on"'
        )
    if config.hosts.count > 1:
        return "the stages are on several hosts"
    if vllm_config.lora_config is not None:
        return "adapters may change it (--enable-lora)"
    if vllm_config.weight_transfer_config is not None:
        return "weights are to be changed (--weight-transfer-config)"
    if vllm_config.parallel_config.worker_extension_cls and config.vocabulary == "auto":
        return (
            'the extension may change it (--worker-extension-cls); it is shared out with "shared"'
        )
    if vllm_config.model_config.enable_sleep_mode:
        return "parts of it on other stages would not sleep (--enable-sleep-mode)"
    if head_of(vllm_config) is not None:
        return "the draft head on the last stage multiplies by it, too (--speculative-config)"
    if getattr(vllm_config.quant_config, "lm_head_quantized", False):
        return "it is quantized"
    return ""


def columns(ranks: Sequence[tuple[int, int]], parts: Sequence[float]) -> tuple[int, ...]:
    """First column of each writer of BIC-L, and V at the end, for writers ``rank * stages + stage``.

    ``ranks`` are the columns of the last stage's ranks, first and last + 1. A rank's columns are
    shared out over the same rank of all stages by ``parts``, in whole blocks of 64 but for the rest
    in its last part."""
    bounds = [ranks[0][0]]
    for start, stop in ranks:
        below = 0.0
        for part in parts:
            below += part
            blocks = round((stop - start) * below / _BLOCK)
            bounds.append(min(stop, start + blocks * _BLOCK))
        bounds[-1] = stop
    assert all(first <= last for first, last in pairwise(bounds)), bounds
    return tuple(bounds)
