"""Prices of earlier engines, by which the first prompt of an engine is cut.

An engine has measured nothing when its first prompt comes. Ratios of prices hardly change from one
start to the next, and those that :func:`.usual` computes from a model's sizes are wrong by what a
machine's attention is slower than its products: three times on a CPU with AVX-512, measured in
bfloat16 (0.15 to 0.18 for 0.52 TFLOP/s of a core). So an engine keeps what it has measured, by machine
and model, and the next one begins with the ratios.

Who runs here: the engine's thread reads, once, before it serves. It never writes: a home directory
on a network can hang, and prices only save time. A thread writes that ends with its file.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from sipipe.best_effort import BestEffort
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.times import Prices, usual
from sipipe.kept import Folder, digest

logger = logging.getLogger(f"vllm.{__name__}")

FOLDER = "prices"
WRITER = "sipipe-prices"
"""Name of the thread that writes."""
CREDIBLE = 30.0
"""Ratio, to the usual price or from it, beyond which a kept one is brought back: prices of an engine
that had short prompts alone say little of long ones."""


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the prices' ratios depend on."""

    machine: str
    """Name of the GPU, or of the CPU's model."""
    model_config: str
    """SHA-256 of the model's configuration."""
    stages: int
    ranks: int
    """Tensor-parallel ranks of each stage."""
    dtype: str
    """Type of activations."""
    quantization: str
    kv_cache_dtype: str
    compiled: bool


class KeptPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices on the slowest stage of an engine, in seconds."""

    subject: Subject
    prices: Prices


_PRICES = Folder(FOLDER, KeptPrices)
_remembering = BestEffort("reading the prices of an earlier engine", bounded=False)


class PriceMemory:
    """Memory, from start to start, of what engines of one configuration have measured on one machine.

    Args:
        vllm_config: The engine's configuration.
        usual_prices: Prices in tokens where nothing is known.
    """

    def __init__(self, vllm_config: VllmConfig, usual_prices: Prices) -> None:
        self._subject = _subject(vllm_config)
        self._writer: threading.Thread | None = None
        self.first = self._load(usual_prices)
        """Prices to begin with, in tokens: an earlier engine's, else the usual ones."""

    def _load(self, usual_prices: Prices) -> Prices:
        earlier = _PRICES.load(self._subject)
        if earlier is None or earlier.subject != self._subject:
            return usual_prices
        token = earlier.prices.token
        # NaN is neither above nor below anything.
        if not all(0 <= price < math.inf for price in earlier.prices) or token <= 0:
            return usual_prices
        ratios = [price / token for price in earlier.prices]
        return Prices._make(
            min(max(ratio, expected / CREDIBLE), expected * CREDIBLE)
            for ratio, expected in zip(ratios, usual_prices, strict=True)
        )

    def keep(self, prices: Prices) -> bool:
        """Keep ``prices``, in seconds, for later engines; returns at once. False if the last ones are
        still being written: these are not kept."""
        if self._writer is not None and self._writer.is_alive():
            return False
        result = KeptPrices(subject=self._subject, prices=prices)
        self._writer = threading.Thread(target=_write, args=(result,), name=WRITER, daemon=True)
        self._writer.start()
        return True


def make_controller(vllm_config: VllmConfig, slots: int) -> ConcurrencyController:
    """A controller for an engine of ``slots`` microbatches, which begins with what an earlier engine
    has measured, and keeps what this one does."""
    usual_prices = usual(decoder_of(vllm_config).facts)
    memory = _remembering(None, PriceMemory, vllm_config, usual_prices)
    return ConcurrencyController(
        stages=vllm_config.parallel_config.pipeline_parallel_size,
        slots=slots,
        first=memory.first if memory else usual_prices,
        keep=memory.keep if memory else None,
    )


def _write(result: KeptPrices) -> None:
    try:
        _PRICES.keep(result.subject, result)
    except Exception as error:
        logger.debug("prices cannot be kept for the next start: %s", error)


def _subject(vllm_config: VllmConfig) -> Subject:
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return Subject(
        machine=_machine(vllm_config.device_config.device_type),
        model_config=digest(model.hf_config.to_dict()),
        stages=parallel.pipeline_parallel_size,
        ranks=parallel.tensor_parallel_size,
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        compiled=vllm_config.compilation_config.mode != CompilationMode.NONE,
    )


def _machine(device_type: str) -> str:
    if device_type != "cpu":
        return str(current_platform.get_device_name())
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return device_type
