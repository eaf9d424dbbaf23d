"""Prices that one engine keeps for the next: what is kept, taken, and not believed."""

import math
import os
import threading
from types import SimpleNamespace

import pytest
from benchmarks.scheduling import SMALL
from benchmarks.simulator.engine_model import EngineModel
from benchmarks.simulator.rules import SlotRule
from benchmarks.simulator.simulator import simulate
from benchmarks.simulator.workload import Arrival
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import numpy as np
from benchmarks.make_model.checkpoint import make_model
from vllm.engine.arg_utils import EngineArgs

from sipipe.engine.scheduling import kept_prices
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.kept_prices import CREDIBLE, PriceMemory, make_controller
from sipipe.engine.scheduling.times import TOGETHER, Load, Prices, usual
from sipipe.kept import Folder

MEASURED = SMALL.prices
"""Seconds."""
RATIOS = Prices._make(price / MEASURED.token for price in MEASURED)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return EngineArgs(
        model=str(make_model("llama", tmp_path_factory.mktemp("model") / "tiny")),
        dtype="float32",
        max_model_len=256,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        enforce_eager=True,
    ).create_engine_config()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("SIPIPE_CACHE_DIR", str(directory))
    return directory


def keep(memory: PriceMemory, prices: Prices) -> None:
    memory.keep(prices)
    written()


def written() -> None:
    """Wait until what is kept has been written."""
    for thread in threading.enumerate():
        if thread.name == kept_prices.WRITER:
            thread.join(timeout=30)


def measure(controller: ConcurrencyController, prices: Prices, batches: int = 400) -> None:
    """Have ``controller`` learn of batches that cost ``prices`` on each stage."""
    rng = np.random.default_rng(0)
    for _ in range(batches):
        tokens, start = rng.integers(1, 200, 2).tolist()
        load = Load(1.0, float(rng.integers(1, 20)), tokens, 900.0, tokens * (start + tokens / 2))
        processes = 3 * controller.stages + 1
        controller.times.add([load] * processes, [prices.of(load)] * processes)
        controller.prices()


def test_the_next_engine_begins_with_the_ratios_that_one_has_measured(config, cache):
    first = make_controller(config, slots=3)
    assert first.first == usual(kept_prices.decoder_of(config).facts)
    measure(first, MEASURED)
    assert first.measured
    written()
    # The last ones may have come while others were written.
    measure(first, MEASURED, batches=TOGETHER)
    written()
    [file] = (cache / kept_prices.FOLDER).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    later = make_controller(config, slots=3)
    assert not later.measured
    assert later.prices().token == 1.0
    assert later.prices().fixed == pytest.approx(RATIOS.fixed, rel=0.1)


def test_prices_that_come_while_others_are_written_are_kept_afterwards(config, monkeypatch):
    """A slow disk costs the latest prices their turn, and not their place."""
    free = threading.Event()
    keep_file = Folder.keep

    def slow(*arguments):
        free.wait(30)
        keep_file(*arguments)

    monkeypatch.setattr(Folder, "keep", slow)
    first = make_controller(config, slots=3)
    measure(first, MEASURED)
    free.set()
    written()
    monkeypatch.setattr(Folder, "keep", keep_file)
    measure(first, MEASURED, batches=TOGETHER)
    written()
    later = make_controller(config, slots=3)
    assert later.prices().fixed == pytest.approx(RATIOS.fixed, rel=0.1)


def test_another_machine_or_model_begins_with_the_usual_prices(config, monkeypatch):
    expected = usual(kept_prices.decoder_of(config).facts)
    keep(PriceMemory(config, expected), MEASURED)
    assert PriceMemory(config, expected).first != expected
    monkeypatch.setattr(kept_prices, "_machine", lambda device_type: "another")
    assert PriceMemory(config, expected).first == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prices=st.builds(Prices, *[st.floats(0.0) | st.sampled_from([-1.0, math.nan])] * 5))
def test_what_is_taken_is_near_the_usual(config, prices):
    """Whatever an engine has kept: the ratios of prices are finite, and none is far from the usual."""
    expected = usual(None)
    keep(PriceMemory(config, expected), prices)
    for ratio, usual_ratio in zip(PriceMemory(config, expected).first, expected, strict=True):
        assert math.isfinite(ratio)
        assert usual_ratio / CREDIBLE <= ratio <= usual_ratio * CREDIBLE


def test_damaged_files_are_none(config, cache):
    expected = usual(None)
    keep(PriceMemory(config, expected), MEASURED)
    [file] = (cache / kept_prices.FOLDER).iterdir()
    content = file.read_bytes()
    for damaged in (content[:-9], b"", b"[]", b"\xff" * 50, content.replace(b"[", b'["x",')):
        file.write_bytes(damaged)
        assert PriceMemory(config, expected).first == expected


def test_a_directory_that_cannot_be_used_costs_nothing_else(config, cache, monkeypatch):
    os.chmod(cache, 0o777)
    controller = make_controller(config, slots=3)
    measure(controller, MEASURED, batches=64)
    assert controller.measured
    # Nor does a configuration that cannot be written.
    broken = SimpleNamespace(to_dict=lambda: {("a", "tuple"): object()})
    monkeypatch.setattr(config.model_config, "hf_config", broken)
    monkeypatch.setattr(kept_prices, "decoder_of", lambda config: SimpleNamespace(facts=None))
    assert make_controller(config, slots=3).first == usual(None)


class Chunks(EngineModel):
    """An engine that notes the chunks of a long prompt."""

    def __init__(self) -> None:
        super().__init__(max_tokens=8192, max_running=8, kv_tokens=1 << 16)
        self.chunks: list[tuple[int, int]] = []

    def fill(self, **allowed):
        batch = super().fill(**allowed)
        for request, tokens in batch.tokens.items():
            self.chunks.append((request.computed - tokens, tokens))
        return batch


@pytest.mark.parametrize("length", [850, 2000, 8000])
def test_the_first_prompts_chunks_take_equal_times(length):
    """With the prices of an earlier engine; their spread was 0.2 for 8,000 tokens without."""
    engine = Chunks()
    simulate(
        [Arrival(0.0, length, 1)],
        SlotRule(slots=3, max_tokens=8192, stages=2, paced=True, first=RATIOS),
        stages=2,
        inflight=3,
        costs=SMALL,
        engine=engine,
    )
    times = [MEASURED.fixed + MEASURED.chunk(*chunk) for chunk in engine.chunks]
    assert len(times) > 2
    assert np.std(times) < 0.15 * np.mean(times)
