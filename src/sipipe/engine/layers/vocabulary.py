"""Whether the output projection is shared out over all stages, and who has which columns."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from vllm.config import VllmConfig

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.choose import choose_layers, device_kind, model_facts
from sipipe.engine.layers.cut import (
    WORTH_SHARING,
    fill,
    layers_work,
    projection_times,
    share_projection,
)
from sipipe.engine.setup.compatibility import device_may_draw

_BLOCK = 64
"""Columns that stay together: vLLM pads its vocabulary to as many, and kernels work on fewer."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Who multiplies by the output projection."""

    parts: tuple[float, ...] = ()
    """Each stage's part of the columns, together 1; empty: the last stage has all."""
    why: str = ""
    work: tuple[float, ...] = ()
    """What each stage's layers cost, in any unit, where the projection is shared out."""

    def __str__(self) -> str:
        if not self.parts:
            return f"Output projection on the last stage: {self.why}" if self.why else ""
        parts = ", ".join(f"{part:.0%}" for part in self.parts)
        return f"Output projection shared out over the stages: {parts} of its columns ({self.why})"


def choose_vocabulary(
    vllm_config: VllmConfig, config: SiPipeConfig, cut: tuple[int, ...]
) -> tuple[Vocabulary, tuple[int, ...]]:
    """Who multiplies by the output projection, and the layers of the stages then, where
    samplers draw. ``cut``: the layers where the last stage has the projection."""
    if config.vocabulary == "last" or len(cut) == 1:
        return Vocabulary(), cut
    why = _why_last(vllm_config, config)
    facts = None if why else model_facts(vllm_config)
    if facts is None:
        return Vocabulary(why=why or "the sizes of the model's weights are not known"), cut
    even = choose_layers(vllm_config, config, by_cost=False)
    tp = vllm_config.parallel_config.tensor_parallel_size
    kind = device_kind()
    parts, gain = share_projection(facts, cut, even, tp, device=kind)
    said = f"the slowest stage {gain:.2f} x as quick with layers {even} as unshared with {cut}"
    if config.vocabulary == "auto" and gain < WORTH_SHARING:
        return Vocabulary(why=f"sharing it out would make {said}"), cut
    work = layers_work(facts, even, tp, kind)
    return Vocabulary(parts, f"expected to make {said}", work), even


def settle(
    expected: Vocabulary,
    config: SiPipeConfig,
    layers: Sequence[float],
    projection: float,
    *,
    reserved: bool = False,
) -> Vocabulary:
    """The parts by what was measured: seconds of each stage's ``layers`` for a microbatch of decoding
    sequences, and of all of the output ``projection`` on the last stage. ``reserved``: stages have
    memory for their expected parts (GPUs): none but the last gets more than that."""
    whole = projection_times(expected.work, layers, projection)
    parts, _ = fill(layers, whole)
    if reserved:
        others = [min(pair) for pair in zip(parts, expected.parts, strict=True)][:-1]
        parts = (*others, 1 - sum(others))
    shared = [own + part * all_ for own, part, all_ in zip(layers, parts, whole, strict=True)]
    gain = max(*layers, layers[-1] + projection) / max(shared)
    why = (
        f"{expected.why}; measured: layers {_ms(layers)}, all of the projection {_ms(whole)}, the "
        f"slowest stage {gain:.2f} x as quick shared as unshared with the same layers"
    )
    keep = config.vocabulary == "auto" and gain < WORTH_SHARING
    return Vocabulary(() if keep else parts, why, expected.work)


def _ms(times: Sequence[float]) -> str:
    return ", ".join(f"{seconds * 1e3:.1f}" for seconds in times) + " ms"


def _why_last(vllm_config: VllmConfig, config: SiPipeConfig) -> str:
    """What keeps the projection on the last stage, from the configuration alone; or nothing."""
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
    if getattr(vllm_config.quant_config, "lm_head_quantized", False):
        return "it is quantized"
    return ""


def columns(ranks: Sequence[tuple[int, int]], parts: Sequence[float]) -> tuple[int, ...]:
    """First column of each writer and V at the end, for writers ``rank * stages + stage``.
    ``ranks``: the columns of the last stage's ranks, first and last + 1. A rank's are shared out
    over the same rank of all stages by ``parts``, whole blocks of 64 but for its last part."""
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
