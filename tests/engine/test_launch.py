"""What the command line makes of vLLM's arguments, before any engine starts."""

import argparse

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.config import SiPipeConfig
from sipipe.engine import launch
from sipipe.errors import ConfigError, ResourceError, UnsupportedError
from sipipe.tools.make_model.checkpoint import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


def config_of(model, *argv, **settings):
    args = launch.parse_engine_args([model, *argv], settings)
    engine_args = launch.AsyncEngineArgs.from_cli_args(args)
    return launch.checked(engine_args.create_engine_config)


def test_the_executor_and_its_settings_reach_vllm(model):
    config = config_of(model, "-pp", "2", "--max-model-len", "256", samplers=2)
    assert config.parallel_config.pipeline_parallel_size == 2
    assert config.additional_config == {"sipipe": {"samplers": 2}}
    backend = config.parallel_config.distributed_executor_backend
    assert isinstance(backend, type)
    assert backend.__name__ == "Executor"
    assert backend.__module__ == "sipipe.engine.executor"


def test_eager_is_the_default_of_short_commands_on_cpu(model):
    if not launch.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    assert launch.parse_engine_args([model], {}).enforce_eager
    assert not launch.parse_engine_args([model, "--no-enforce-eager"], {}).enforce_eager
    assert not launch.parse_engine_args([model], None, eager_on_cpu=False).enforce_eager


def test_cpu_stages_share_the_memory_for_their_kv_caches(model, monkeypatch):
    if not launch.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    one = launch.parse_engine_args([model], {}).kv_cache_memory_bytes
    four = launch.parse_engine_args([model, "-pp", "2", "-tp", "2"], {}).kv_cache_memory_bytes
    assert one == pytest.approx(4 * four, rel=0.2)  # other programs take and give memory
    given = launch.parse_engine_args([model, "--kv-cache-memory-bytes", "1G"], {})
    assert given.kv_cache_memory_bytes == 1 << 30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert launch.parse_engine_args([model], {}).kv_cache_memory_bytes is None


def args(**more):
    values = {
        "distributed_executor_backend": None,
        "additional_config": {},
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.5,
    }
    return argparse.Namespace(**values | more)


def test_settings_of_the_command_line_join_those_of_additional_config():
    given = args(additional_config={"other": 1, "sipipe": {"inflight": 4}})
    launch.use_sipipe(given, {"samplers": 2})
    assert given.additional_config == {"other": 1, "sipipe": {"inflight": 4, "samplers": 2}}
    assert given.distributed_executor_backend == "sipipe.Executor"


@pytest.mark.parametrize(
    ("more", "settings", "words"),
    [
        ({"distributed_executor_backend": "mp"}, {}, "--distributed-executor-backend is mp"),
        ({"additional_config": {"sipipe": {"samplers": 1}}}, {"samplers": 2}, "give it once"),
        ({"additional_config": {"sipipe": {"sampler": 1}}}, {}, 'did you mean "samplers"'),
        ({"additional_config": {"sipipe": 3}}, {}, "must be an object"),
    ],
)
def test_contradictions_are_named(more, settings, words):
    with pytest.raises(ConfigError, match=words):
        launch.use_sipipe(args(**more), settings)


def test_vllms_own_refusals_are_one_line(model):
    with pytest.raises(ConfigError) as caught:
        config_of(model, "-tp", "3")
    assert "\n" not in str(caught.value)
    assert "attention heads" in str(caught.value)


def test_what_sipipe_does_not_serve_is_refused_in_the_foreground(model):
    speculative = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    config = config_of(model, "--speculative-config", speculative, "--max-model-len", "256")
    with pytest.raises(UnsupportedError, match="--speculative-config"):
        launch.announce(config)


def test_the_core_plan_is_printed_in_two_lines(model, capsys):
    launch.announce(config_of(model, "-pp", "2", "--max-model-len", "256"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("core plan: stage 0: core")
    assert "sampler" in lines[1]
    assert len(lines) == 2


def test_too_little_shared_memory_is_said_before_the_start(model, monkeypatch, tmp_path):
    config = config_of(model, "-pp", "2", "--max-model-len", "256", shm_dir=str(tmp_path))
    settings = SiPipeConfig.from_additional_config(config.additional_config)
    usage = launch.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        launch.shutil, "disk_usage", lambda _path: type(usage)(64 << 20, 0, 1 << 20)
    )
    with pytest.raises(ResourceError, match="has 1 MiB free, and this configuration needs") as it:
        launch.check_shared_memory(config, settings)
    assert "--max-num-seqs" in str(it.value)
    monkeypatch.undo()
    launch.check_shared_memory(config, settings)
    missing = SiPipeConfig(shm_dir=str(tmp_path / "none"))
    with pytest.raises(ResourceError, match="No such file"):
        launch.check_shared_memory(config, missing)
