"""Where tokens are drawn, by measurements that stand in for those of an engine's start.

On a served engine: tests/engine/test_second_runner.py.
"""

import dataclasses

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.engine")

from sipipe.engine.cpu_sampling import Costs, choose
from sipipe.engine.layers import choose as layers
from sipipe.messages.measured import MIXES

MS = 1e-3


def costs(*, device=(4.0, 4.0, 4.0), draws=(1.0, 1.0, 1.0), plain=None, **more):
    """Two stages of 10 ms and 8 layers each, a projection of 2 ms, times in ms; rows that are drawn
    on the device take what vLLM's sampler takes."""
    values = {"stages": (10.0, 10.0), "projection": 2.0, "copy": 0.5, **more}
    return Costs(
        sequences=64,
        inflight=3,
        layers=values.pop("layers", (8, 8)),
        stages=tuple(seconds * MS for seconds in values["stages"]),
        projection=values["projection"] * MS,
        device={mix: seconds * MS for mix, seconds in zip(MIXES, device, strict=True)},
        plain={
            mix: seconds * MS
            for mix, seconds in zip(["greedy", "temperature"], plain or device[:2], strict=True)
        },
        copy=values["copy"] * MS,
        copied=64 * 1000,
        draws={mix: seconds * MS for mix, seconds in zip(MIXES, draws, strict=True)},
    )


def periods(way):
    return [pytest.approx(seconds / MS) for seconds in way.periods.values()]


def test_the_slowest_part_bounds_the_period():
    """Stages on the device; on CPUs also the copy, the drawing, and a round over m."""
    found = choose(costs(device=(2.1, 3.0, 9.0), draws=(1.0, 13.5, 14.6)), recut=False)
    assert periods(found.device) == [12.1, 13.0, 19.0]
    # 10 + 12 + 0.5 + 1 = 23.5 over 3 microbatches is below the last stage; drawing is not.
    assert periods(found.cpus) == [12.0, 13.5, 14.6]
    assert periods(choose(costs(copy=16.0), recut=False).cpus) == [16.0] * 3
    # No part is slow, but a round has to pass through all of them.
    assert periods(choose(costs(copy=9.0, draws=(11.0,) * 3), recut=False).cpus) == [14.0] * 3


@pytest.mark.parametrize(
    ("device", "on_cpus"),
    [
        ((2.3, 2.3, 2.3), False),  # 12.0 against 12.3: 2.4 %
        ((2.4, 2.4, 2.4), True),  # 3.2 %
        ((2.0, 2.0, 3.2), True),  # 12, 12, 13.2: 3.2 % in the mean
        ((2.0, 2.0, 3.0), False),
        ((1.7, 1.7, 6.0), True),  # 2.5 % slower with two mixes, which the third outweighs
        ((1.5, 6.0, 6.0), False),  # 4.3 % slower with one: nobody is to lose by it
    ],
)
def test_cpus_draw_where_they_save_three_percent_and_cost_nobody_as_much(device, on_cpus):
    found = choose(costs(device=device), recut=False)
    assert (found.draws == "on") is on_cpus


@pytest.mark.parametrize(
    ("device", "draws", "plain", "chosen"),
    [
        # Samplers are late with everything, the device with all strategies: each row its place.
        ((2.3, 2.3, 9.0), (13.5, 13.5, 13.5), (2.3, 2.3), "per_row"),
        # Samplers are in time: nothing is saved by drawing on the device.
        ((2.3, 2.3, 9.0), (1.0, 1.0, 1.0), (2.0, 2.0), "on"),
        # Samplers are late, the device with nothing.
        ((2.1, 2.1, 2.4), (13.5, 13.5, 13.5), (2.1, 2.1), "off"),
        # They are late with plain rows alone, and not by 3 % of the mean.
        ((9.0, 9.0, 9.0), (12.5, 12.5, 12.0), (2.2, 2.2), "on"),
        ((9.0, 9.0, 9.0), (13.0, 13.0, 12.0), (2.2, 2.2), "per_row"),
        # The device would hold up greedy rows by more than 3 %.
        ((9.0, 9.0, 9.0), (12.0, 15.0, 12.0), (2.5, 2.0), "on"),
    ],
)
def test_each_row_has_its_place_where_that_saves_three_percent(device, draws, plain, chosen):
    found = choose(costs(device=device, draws=draws, plain=plain), recut=False)
    assert found.draws == chosen
    assert found.rows.periods["all"] == found.cpus.periods["all"]
    assert periods(found.rows)[:2] == [10.0 + seconds for seconds in plain]


def test_each_way_has_its_best_cut():
    """A layer takes 1.25 ms: with 2 ms of projection 9 and 7, with 10 of vLLM's sampler 12 and 4."""
    found = choose(costs(device=(10.0,) * 3), recut=True)
    assert (found.cpus.layers, found.device.layers) == ((9, 7), (12, 4))
    assert periods(found.cpus) == [11.25] * 3
    assert periods(found.device) == [15.0] * 3
    fixed = choose(costs(device=(10.0,) * 3), recut=False)
    assert fixed.cpus.layers == fixed.device.layers == (8, 8)


def test_the_cut_that_is_loaded_is_kept_where_none_is_better():
    loaded = costs(layers=(9, 7), stages=(11.25, 8.75))
    assert choose(loaded, recut=True).cpus.layers == (9, 7)


def test_one_stage_has_one_cut():
    one = dataclasses.replace(costs(), layers=(16,), stages=(20 * MS,), inflight=2)
    found = choose(one, recut=True)
    assert found.cpus.layers == (16,)
    assert periods(found.cpus) == [22.0] * 3
    assert periods(found.device) == [24.0] * 3
    assert found.draws == "on"


def test_four_stages_share_what_the_last_gives_up():
    four = dataclasses.replace(costs(device=(6.0,) * 3), layers=(8,) * 4, stages=(8 * MS,) * 4)
    found = choose(four, recut=True)
    # A layer takes 1 ms: of the cuts that give 10 ms, the one most like the one that is loaded.
    assert sorted(found.device.layers[:3]) == [9, 9, 10]
    assert found.device.layers[3] == 4
    assert periods(found.device) == [10.0] * 3


def test_the_line_has_the_numbers_and_the_choice():
    line = str(choose(costs(device=(2.1, 3.0, 9.0), draws=(1.0, 3.2, 6.4)), recut=False))
    assert "\n" not in line
    assert line.startswith("cpu_sampling auto: CPU samplers draw.")
    assert "64 sequences a microbatch" in line
    assert "with layers [8, 8], [8, 8], [8, 8]: " in line
    assert "greedy 12, 12.1, 12.1; temperature 12, 13, 13; all 12, 12, 19. " in line
    assert "Stages 10, 10 ms, projection 2 ms" in line
    assert "rows of no more than a temperature 2.1, 3 ms" in line
    assert "vLLM's sampler 2.1, 3, 9 ms" in line
    assert "logits to the host 0.5 ms (0.128 GB/s)" in line
    assert "15.6, 50, 100 us a row" in line
    assert '"layers"' not in line
    line = str(choose(costs(device=(2.0,) * 3), recut=True))
    assert "vLLM's sampler draws on the last stage's device" in line
    assert '"layers": [9, 7] would save 6% of that' in line
    slight = str(choose(costs(stages=(40.0, 40.0)), recut=True))
    assert '"layers"' not in slight, "a cut that would save less than 3 % is not worth a word"


@pytest.mark.parametrize(
    ("setting", "variable", "free"),
    [("auto", None, True), ("auto", "9,7", False), ("even", None, False), ((9, 7), None, False)],
)
def test_a_cut_of_the_users_is_kept(monkeypatch, setting, variable, free):
    config = layers.SiPipeConfig(layers=setting)
    monkeypatch.setattr(layers.envs, "VLLM_PP_LAYER_PARTITION", variable, raising=False)
    assert layers.is_free(config) is free


def test_each_stage_has_a_speed_of_its_own():
    """A slow device in front gives layers to the quick one behind it, and no time is below zero."""
    uneven = costs(stages=(24.0, 3.0), projection=1.0, draws=(0.1,) * 3, copy=0.1)
    found = choose(uneven, recut=True)
    assert found.cpus.layers == (2, 14)
    assert periods(found.cpus) == [6.25] * 3
