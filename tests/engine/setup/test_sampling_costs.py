"""Where tokens are drawn, by measurements that stand in for those of an engine's start.

On a served engine: tests/engine/test_second_runner.py.
"""

import dataclasses

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.engine")

from sipipe.engine.setup.sampling_costs import Costs
from sipipe.messages.measured import MIXES

MS = 1e-3


def costs(*, device=(4.0, 4.0, 4.0), draws=(1.0, 1.0, 1.0), plain=None, **more):
    """Two stages of 10 ms each, a projection of 2 ms, times in ms; rows that are drawn
    on the device take what vLLM's sampler takes."""
    values = {"stages": (10.0, 10.0), "projection": 2.0, "copy": 0.5, **more}
    return Costs(
        sequences=64,
        inflight=3,
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
        head=None if "head" not in more else more["head"] * MS,
    )


def periods(choice, way):
    return [pytest.approx(seconds / MS) for seconds in choice.periods[way]]


def test_the_slowest_part_bounds_the_period():
    """Stages on the device; on CPUs also the copy, the drawing, and a round over m."""
    measured = costs(device=(2.1, 3.0, 9.0), draws=(1.0, 13.5, 14.6))
    assert periods(measured, "off") == [12.1, 13.0, 19.0]
    # 10 + 12 + 0.5 + 1 = 23.5 over 3 microbatches is below the last stage; drawing is not.
    assert periods(measured, "on") == [12.0, 13.5, 14.6]
    assert periods(costs(copy=16.0), "on") == [16.0] * 3
    # No part is slow, but a round has to pass through all of them.
    assert periods(costs(copy=9.0, draws=(11.0,) * 3), "on") == [14.0] * 3
    # With one in flight the device's way is the whole round too.
    single = dataclasses.replace(costs(), inflight=1)
    assert periods(single, "off") == [24.0] * 3
    assert periods(single, "per_row")[:2] == [24.0] * 2


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
    measured = costs(device=device)
    assert (measured.choice == "on") is on_cpus


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
    measured = costs(device=device, draws=draws, plain=plain)
    assert measured.choice == chosen
    assert measured.periods["per_row"][2] == measured.periods["on"][2]
    assert periods(measured, "per_row")[:2] == [10.0 + seconds for seconds in plain]


@pytest.mark.parametrize(
    ("head", "draws", "chosen"),
    [
        # 10 + 12 + 6 + 0.5 + 1 = 29.5 over 3 microbatches is below the last stage: 18 against 20.
        (6.0, 1.0, "on"),
        # 10 + 12 + 6 + 0.5 + 35 = 63.5 over 3 microbatches is above what the device takes.
        (6.0, 35.0, "off"),
        # What would save 3 % without a head does not beside it.
        (60.0, 1.0, "off"),
    ],
)
def test_samplers_and_a_head_are_compared_with_one_step_on_the_device(head, draws, chosen):
    measured = costs(device=(4.0,) * 3, draws=(draws,) * 3, plain=(2.0, 2.0), head=head)
    assert measured.choice == chosen
    assert set(measured.periods) == {"on", "off"}, "samplers verify all rows or none"
    line = str(measured)
    assert f"the draft head {head:.3g} ms" in line
    assert "by row" not in line


def test_the_line_has_the_numbers_and_the_choice():
    line = str(costs(device=(2.1, 3.0, 9.0), draws=(1.0, 3.2, 6.4)))
    assert "\n" not in line
    assert line.startswith("cpu_sampling auto: CPU samplers draw.")
    assert "64 sequences a microbatch" in line
    assert "vLLM's sampler: greedy 12, 12.1, 12.1; temperature 12, 13, 13; all 12, 12, 19. " in line
    assert "Stages 10, 10 ms, projection 2 ms" in line
    assert "rows of no more than a temperature 2.1, 3 ms" in line
    assert "vLLM's sampler 2.1, 3, 9 ms" in line
    assert "logits to the host 0.5 ms (0.128 GB/s)" in line
    assert "15.6, 50, 100 us a row" in line
    line = str(costs(device=(2.0,) * 3))
    assert "vLLM's sampler draws on the last stage's device" in line
