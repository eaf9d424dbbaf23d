"""The settings: each key's allowed values, and one clear line for everything else."""

import json
import pickle
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from sipipe.config import (
    ONLY_SIPIPE_HAS,
    CorePlacement,
    MicrobatchSettings,
    SiPipeConfig,
    asked_of_sipipe,
)
from sipipe.errors import ConfigError, SiPipeError


def parse(**settings):
    return SiPipeConfig.from_additional_config({"sipipe": settings})


@pytest.mark.parametrize(
    "key",
    [
        *SiPipeConfig.__struct_fields__,
        *(f"microbatches.{name}" for name in MicrobatchSettings.__struct_fields__),
        *(f"cores.{name}" for name in CorePlacement.__struct_fields__),
    ],
)
def test_every_key_says_what_it_may_be(key):
    outer, _, inner = key.partition(".")
    with pytest.raises(ConfigError, match=rf'"{key}" must be .{{9,}}, not -1\.5') as caught:
        parse(**{outer: {inner: -1.5} if inner else -1.5})
    assert "must be one of ," not in str(caught.value)


@pytest.mark.parametrize("name", ["cpu_sampling", "scheduler", "transport"])
def test_declared_choices_are_the_accepted_ones(name):
    for choice in get_args(get_type_hints(SiPipeConfig)[name]):
        assert getattr(parse(**{name: choice}), name) == choice


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"sipipe": None}, {"sipipe": {}}])
def test_nothing_given_means_the_defaults(additional):
    assert SiPipeConfig.from_additional_config(additional) == SiPipeConfig()


def test_round_trip_through_json():
    config = parse(
        samplers=2,
        inflight=3,
        layers=[6, 2],
        microbatches={"max_moves": 2},
        cores={"stages": [[0, 1], [2]], "samplers": [[3], [4]], "scheduler": [5]},
        trace="traces",
        stall_timeout=5,
    )
    assert SiPipeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.cores == CorePlacement(
        stages=((0, 1), (2,)), samplers=((3,), (4,)), scheduler=(5,)
    )
    assert config.microbatches == MicrobatchSettings(max_moves=2)
    assert SiPipeConfig.from_dict(SiPipeConfig().to_dict()) == SiPipeConfig()


def test_settings_are_written_alike_in_every_process():
    """Hosts compare them: one may have them from another of its processes, one from its options."""
    config = SiPipeConfig.from_dict({"microbatches": {"kv_reserve": 0.02}})
    for same in (SiPipeConfig(), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert same.to_dict() == config.to_dict()


def test_inflight_auto_is_stages_plus_one():
    assert SiPipeConfig().resolved_inflight(4) == 5
    assert parse(inflight=2).resolved_inflight(4) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": 2}, ['"sampler"', 'did you mean "samplers"']),
        ({"in_flight": 2}, ['"in_flight"', 'did you mean "inflight"']),
        ({"Stall-Timeout": 2}, ['did you mean "stall_timeout"']),
        ({"zzz": 2}, ['"zzz"', "known: samplers, inflight"]),
        ({"tra\nce": 2}, ['unknown key "tra\\nce"; did you mean "trace"']),
        ({"microbatches": {"a\nb": 2}}, ['unknown key "microbatches.a\\nb"']),
        ({"microbatches": {"tpot_target_ms": float("inf")}}, ["finite number of milliseconds"]),
        ({"samplers": 0}, ['"samplers"', "1 to 128", "not 0"]),
        ({"samplers": True}, ['"samplers"', "not True"]),
        ({"samplers": "2"}, ['"samplers"', "not '2'"]),
        ({"cpu_sampling": True}, ['"cpu_sampling"', '"auto", "off", "on", "per_row"']),
        ({"transport": "shmem"}, ['"transport"', 'did you mean "shm"']),
        ({"transport": "nccl"}, ['"transport"', 'between hosts, "nixl"']),
        ({"trace": ""}, ['"trace"', "path"]),
        ({"stall_timeout": 0}, ['"stall_timeout"', "above 0"]),
        ({"start_timeout": float("inf")}, ['"start_timeout"', "finite"]),
        ({"start_timeout": float("nan")}, ['"start_timeout"']),
        ({"start_timeout": "60"}, ['"start_timeout"', "seconds"]),
        ({"cores": "none"}, ['"cores"', '"auto", "off"']),
        ({"cores": {"stage": [[0]]}}, ['"cores.stage"', 'did you mean "stages"']),
        ({"cores": {"stages": [0, 1]}}, ['"cores.stages[0]"', "not 0"]),
        ({"cores": {"stages": [[0, 0]]}}, ['"cores.stages[0]"', "each CPU number once", "[0, 0]"]),
        ({"cores": {"scheduler": [1, 1]}}, ['"cores.scheduler"', "each CPU number once"]),
        ({"cores": {"stages": [[-1]]}}, ['"cores.stages[0][0]"', "not -1"]),
        ({"cores": {"samplers": [[]]}}, ['"cores.samplers[0]"', "one CPU number or more"]),
        ({"layers": []}, ['"layers" must be "auto", "even", or a list', "not []"]),
        ({"layers": [7, 0]}, ['"layers[1]" must be a whole number of 1 or more', "not 0"]),
        ({"microbatches": [1]}, ['"microbatches" must be an object', "not [1]"]),
        ({"microbatches": {"moves": 1}}, ['unknown key "microbatches.moves"', "max_moves"]),
        ({"microbatches": {"max_moves": -1}}, ['"microbatches.max_moves"', "0 or more"]),
        ({"microbatches": {"max_moves": True}}, ['"microbatches.max_moves"', "not True"]),
        ({"microbatches": {"prefill_spread": 1.5}}, ['"microbatches.prefill_spread"', "not 1.5"]),
        ({"microbatches": {"kv_reserve": 1}}, ["kv_reserve", "a number from 0 to below 1"]),
        ({"microbatches": {"kv_reserve": "x"}}, ['"microbatches.kv_reserve" must be']),
        ({7: 2}, ["str"]),
        ({"samplers": 3, "cores": {"samplers": [[0], [1]]}}, ['"samplers" is 3', "places 2"]),
    ],
)
def test_a_mistake_gets_one_line_that_names_it(settings, words):
    with pytest.raises(ConfigError) as caught:
        SiPipeConfig.from_dict(settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("additional", "word"),
    [
        ({"sipipe": [1]}, "must be an object"),
        ({"sipipe": "x" * 500}, "..."),
        ({"SiPipe": {}}, 'did you mean "sipipe"'),
        ({"si-pipe": {}}, 'did you mean "sipipe"'),
        ([], "must be a JSON object"),
        ({"si\npipe": {}}, 'unknown key "si\\npipe"'),
    ],
)
def test_the_outer_object_is_checked_too(additional, word):
    with pytest.raises(ConfigError, match="sipipe") as caught:
        SiPipeConfig.from_additional_config(additional)
    assert word in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_config_error_is_a_value_error_and_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, SiPipeError)


def test_the_documentation_lists_every_key_with_its_default():
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented = {row[0].strip("| `"): row[2].strip("`") for row in rows}
    assert list(documented) == list(SiPipeConfig().to_dict())
    for key, shown in documented.items():
        assert SiPipeConfig.from_dict({key: json.loads(shown)}) == SiPipeConfig(), key


@pytest.mark.parametrize(
    "settings",
    [
        {"trace": "\ud800"},
        {"trace": "a\0b"},
        {"hosts": {"address": "\ud800"}},
        {"cores": "\ud800"},
        {"vocabulary": "\ud800"},
        {"\ud800": 1},
        {"hosts": {"\udc80": 2}},
    ],
)
def test_text_that_is_none_is_refused_in_one_line(settings):
    """Halves of surrogate pairs: what Python has for bytes of a path that are no UTF-8."""
    with pytest.raises(ConfigError, match=r"(must be|is no text)") as caught:
        parse(**settings)
    assert str(caught.value).isascii()
    assert "\n" not in str(caught.value)


SAY_NOTHING_OF_ONE_STAGE = {"kv_loss", "transport", "trace_limit", "self_test"}
"""Nothing is cut between stages or compared, no link joins them, and a limit alone records no trace."""


def test_each_setting_is_heeded_by_sipipe_alone_or_says_nothing_of_one_stage():
    assert not ONLY_SIPIPE_HAS & SAY_NOTHING_OF_ONE_STAGE
    assert set(SiPipeConfig.__struct_fields__) == ONLY_SIPIPE_HAS | SAY_NOTHING_OF_ONE_STAGE


def test_settings_that_are_given_are_named_in_their_order():
    given = {"trace": None, "trace_limit": 9, "samplers": "auto", "inflight": 3}
    assert asked_of_sipipe({"sipipe": given}) == ["samplers", "inflight"]
    for nothing in (None, {}, {"sipipe": None}, {"other": {"samplers": 1}}):
        assert asked_of_sipipe(nothing) == []
