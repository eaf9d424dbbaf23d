"""What the command line makes of vLLM's arguments, before any engine starts."""

import argparse
import dataclasses
import io
import json
import os
import pickle
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import gaierror
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from benchmarks.make_model.checkpoint import make_model
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from tests.cli import wrong_usages
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sipipe import cpu_features
from sipipe.cli import main
from sipipe.cores import Core, CorePlan, cpus_of, this_machine
from sipipe.engine.executor import Executor
from sipipe.engine.setup import checkpoint, describe, kv_memory
from sipipe.engine.setup.decide import decide
from sipipe.engine.setup.describe import describe_setup
from sipipe.engine.setup.memory_budget import memory_budget
from sipipe.engine.setup.vllm_config import PipelineVllmConfig
from sipipe.engine.start import arguments, launch, plugin
from sipipe.engine.start.refusals import checked
from sipipe.errors import ConfigError, ResourceError, tell
from sipipe.ipc import memory

on_cpus = pytest.mark.skipif(not arguments.current_platform.is_cpu(), reason="a CUDA build of vLLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(autouse=True)
def unannounced(monkeypatch):
    monkeypatch.setattr(plugin, "announced", False)


def config_of(model, *argv, **settings):
    args = arguments.parse_engine_args([model, *argv], settings)
    engine_args = arguments.AsyncEngineArgs.from_cli_args(args)
    return plugin.engine_config(engine_args)


def test_the_executor_and_its_settings_reach_vllm(model):
    config = config_of(model, "-pp", "2", "--max-model-len", "256", samplers=2)
    assert config.parallel_config.pipeline_parallel_size == 2
    assert config.additional_config == {"sipipe": {"samplers": 2}}
    backend = config.parallel_config.distributed_executor_backend
    assert isinstance(backend, type)
    assert backend.__name__ == "Executor"
    assert backend.__module__ == "sipipe.engine.executor"


@on_cpus
def test_engines_of_our_executor_have_the_second_runner_on_cpus_and_others_vllms_default(model):
    """By each name and by the class, in turn with stock engines, in one process."""
    plugin.register()
    short = {"model": model, "max_model_len": 256, "pipeline_parallel_size": 2}
    for backend in ("sipipe", "sipipe.Executor", "mp", Executor, "mp"):
        config = EngineArgs(**short, distributed_executor_backend=backend).create_engine_config()
        assert config.use_v2_model_runner is (backend != "mp"), backend
        assert type(config) is (VllmConfig if backend == "mp" else PipelineVllmConfig)


def test_models_of_several_parts_can_make_configurations_of_ours(model):
    """vLLM copies the engine's for the language model of one that sees."""
    config = config_of(model, "-pp", "2", "--max-model-len", "256")
    config.replicas = 2
    made = config.with_hf_config(config.model_config.hf_config)
    assert type(made) is PipelineVllmConfig
    assert (made.replicas, made.ahead, made.max_concurrent_batches) == (2, 1, 4)


@pytest.mark.parametrize("name", ["vllm", "vllm.entrypoints.cli.main", "train.py"])
def test_a_wrong_setting_ends_vllms_commands_in_one_line_and_raises_in_python(
    model, monkeypatch, capsys, name
):
    plugin.register()
    spec = SimpleNamespace(name=name) if "cli" in name else None
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec, __file__=name))
    wrong = EngineArgs(
        model=model,
        distributed_executor_backend="sipipe.Executor",
        additional_config={"sipipe": {"sampler": 2}},
    )
    if name == "train.py":
        with pytest.raises(ConfigError, match="sampler"):
            wrong.create_engine_config()
        return
    with pytest.raises(SystemExit) as ended:
        wrong.create_engine_config()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("sipipe: ")
    assert "sampler" in said[-1]


@on_cpus
@pytest.mark.parametrize("slow", [True, False])
def test_a_cpu_without_instructions_for_bfloat16_is_named(model, monkeypatch, slow):
    monkeypatch.setattr(cpu_features, "slow", lambda: slow)
    for dtype in ("bfloat16", "float32"):
        lines = describe_setup(decide(config_of(model, "--dtype", dtype, "--max-model-len", "256")))
        named = [line for line in lines if cpu_features.HINT in line]
        assert named == ([f"bfloat16: {cpu_features.HINT}"] if slow and dtype == "bfloat16" else [])


@on_cpus
def test_one_stage_that_sipipe_runs_on_a_gpu_is_said_to_be_and_by_which_setting(model, monkeypatch):
    short = ("--max-model-len", "256")
    for stages, settings, said in (
        (1, {"samplers": 1, "trace_limit": 64}, 'by SiPipe, as "samplers" asks: '),
        (1, {}, "by SiPipe, as nothing else can: "),
        (2, {"samplers": 1}, ""),
    ):
        decided = decide(config_of(model, *short, "-pp", str(stages), **settings))
        with monkeypatch.context() as gpu:
            gpu.setattr(describe, "current_platform", SimpleNamespace(is_cpu=lambda: False))
            found = [line for line in describe_setup(decided) if "one stage on a GPU" in line]
        assert len(found) == bool(said)
        assert all(said in line for line in found)


@on_cpus
def test_a_worker_whose_cores_are_of_several_numa_nodes_is_named(model, monkeypatch):
    decided = decide(config_of(model, "--max-model-len", "256"))
    cpus = (*decided.cores.workers[0][0], 4000)
    both = dataclasses.replace(
        decided, cores=dataclasses.replace(decided.cores, workers=((cpus,),))
    )
    for nodes, named in ((1, 0), (2, 1)):
        cores = [Core((cpu,), index * nodes // len(cpus)) for index, cpu in enumerate(cpus)]
        monkeypatch.setattr(kv_memory, "this_machine", lambda most, cores=cores: cores)
        assert sum("several NUMA nodes" in line for line in describe_setup(both)) == named


@on_cpus
def test_replicas_share_memory_and_cores_as_is_decided_before_they_start(model):
    plugin.register()
    short = ("-pp", "2", "--max-model-len", "256", "-dp")
    one, two = (config_of(model, *short, n) for n in ("1", "2"))
    setup = decide(two)
    assert setup.kv_bytes == pytest.approx(decide(one).kv_bytes / 2, rel=0.2)
    assert describe_setup(setup)[0].startswith("replica 0 of 2")
    begun = pickle.loads(pickle.dumps(by_vllm(model, *short, "2")))
    begun.parallel_config.data_parallel_index = 1
    begun.parallel_config.reconfigure_for_independent_dp_rank()
    other = decide(begun)
    given = begun.cache_config.kv_cache_memory_bytes
    assert given == pytest.approx(setup.kv_bytes, rel=0.2)
    assert other.kv_bytes is None
    assert describe_setup(other)[0].startswith("replica 1 of 2")
    each = memory_budget(other)
    assert memory_budget(setup) == {what: 2 * size for what, size in each.items()}
    everything = cpus_of(this_machine())
    assert setup.cores.cpus | other.cores.cpus <= set(everything)
    if len(everything) > 1:
        assert not setup.cores.cpus & other.cores.cpus
    two.additional_config = {"sipipe": {"cores": {"stages": [[0], [0]]}}}
    with pytest.raises(ConfigError, match='"cores" places one pipeline'):
        decide(two)


@pytest.mark.slow
def test_vllm_serve_ends_in_one_line(model):
    """Also on the newest vLLM. Other mistakes: tests/cli/test_wrong_usages.py."""
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", model, "-pp", "9"]
    command += ["--distributed-executor-backend", "sipipe.Executor"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 2, said.stderr[-2000:]
    assert "Traceback" not in said.stderr + said.stdout
    assert said.stderr.splitlines()[-1].startswith("sipipe: ")


@on_cpus
def test_eager_is_the_default_of_short_commands_on_cpu(model):
    assert arguments.parse_engine_args([model], {}).enforce_eager
    assert not arguments.parse_engine_args([model, "--no-enforce-eager"], {}).enforce_eager


def test_words_may_stand_anywhere_beside_vllms_options(model):
    words = ["Once upon a time", "2 + 2 ="]
    for argv in (
        [model, *words, "-pp", "2", "--max-model-len", "256"],
        [model, "-pp", "2", "--max-model-len", "256", *words],
        [model, words[0], "--no-enforce-eager", words[1], "-pp", "2", "--max_model_len=256"],
        ["--max-model-len", "256", model, "-pp", "2", "--", *words],
    ):
        args = arguments.parse_engine_args(argv, {})
        assert args.words == words
        assert (args.model, args.pipeline_parallel_size, args.max_model_len) == (model, 2, 256)
    assert arguments.parse_engine_args([model, "--", "-5 is"], {}).words == ["-5 is"]
    with pytest.raises(ConfigError, match="did you mean --max-model-len"):
        arguments.parse_engine_args([model, "--max-model-length", "256"], {})
    # A parameter of sampling that the command has no option for, and that is no option of vLLM's.
    with pytest.raises(ConfigError, match=r"^unrecognized arguments: --bad-words=2") as error:
        arguments.parse_engine_args([model, "--bad-words=2"], {})
    assert "did you mean --bad-words?" not in str(error.value)


GIB = 1 << 30


@pytest.fixture
def nodes(monkeypatch):
    """Memory nodes of 6 and 100 GiB, two CPUs on each."""
    free = {0: 6 * GIB, 1: 100 * GIB}
    resources = kv_memory.cpu_resource_utils
    monkeypatch.setattr(
        resources,
        "get_memory_node_info",
        lambda node: resources.MemoryNodeInfo(free[node] * 5 // 4, free[node]),
    )
    cpus = [resources.LogicalCPUInfo(cpu, cpu, cpu // 2) for cpu in range(4)]
    monkeypatch.setattr(resources, "get_allowed_cpu_list", lambda: cpus)
    monkeypatch.setattr(resources, "get_visible_memory_node", lambda: [0, 1])
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    return free


def plan(*workers):
    return CorePlan(workers=tuple((cpus,) for cpus in workers), samplers=((0,),), scheduler=(0,))


@pytest.mark.parametrize(
    ("workers", "weights", "gib"),
    [
        (plan((0,), (1,)), 0, 0.4 * 6 / 2),
        (plan((0,), (1,)), 2, 0.4 * (6 - 2) / 2),
        (plan((0,), (2,)), 0, 0.4 * 6),  # one size for all: the smaller node's
        (plan((0,), (2,)), 2, 0.4 * (6 - 1)),
        (plan((2,), (3,)), 20, 0.4 * (100 - 20) / 2),
        (plan((3, 2), (0, 1), (1,)), 0, 0.4 * 6 / 2),
        (plan((), ()), 0, 0.4 * 6 / 2),  # not bound: the first node
    ],
)
def test_kv_caches_fit_the_memory_node_of_each_worker(nodes, workers, weights, gib):
    given = kv_memory.kv_cache_bytes(kv_memory.worker_nodes(workers), weights * GIB)
    assert given == pytest.approx(gib * GIB, abs=1 << 20)
    assert given % (1 << 20) == 0


def test_workers_on_cpus_of_the_users_choice_or_on_hidden_nodes(nodes, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "2-3|3")
    assert kv_memory.worker_nodes(plan((0,), (1,))) == [1, 1]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert kv_memory.worker_nodes(plan((2,), (3,))) == [0, 0]
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(kv_memory.cpu_resource_utils, "get_visible_memory_node", lambda: [1])
    assert kv_memory.worker_nodes(plan((0,), (3,))) == [1, 1]


@pytest.mark.parametrize("kind", ["decoder", "encoder_only", "hybrid"])
def test_a_prompt_is_too_long_only_where_every_layer_keeps_it(kind):
    longest = SimpleNamespace(
        hf_text_config=SimpleNamespace(),
        original_max_model_len=None,
        attn_type=kind,
        dtype=torch.float32,
        max_model_len=1024,
        get_sliding_window=lambda: None,
    )
    config = SimpleNamespace(
        model_config=longest,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    refused = pytest.raises(ConfigError, match="--max-model-len 1024")
    with refused if kind == "decoder" else nullcontext():
        kv_memory.check_longest(config, elements=1 << 10, size=1 << 20)


def by_sipipe(model, *argv):
    return config_of(model, *argv)


def by_vllm(model, *argv):
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    words = ["--model", model, "--distributed-executor-backend", "sipipe.Executor", *argv]
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()


def by_python(model, *argv):
    given = {"distributed_executor_backend": Executor, **wrong_usages.arguments(argv)}
    return EngineArgs(model=model, **given).create_engine_config()


@on_cpus
@pytest.mark.parametrize("door", [by_sipipe, by_vllm, by_python])
def test_every_door_divides_the_memory_that_is_free(model, nodes, monkeypatch, door):
    """On a machine of which less is free than vLLM would claim."""
    plugin.register()
    monkeypatch.setattr("sipipe.engine.setup.decide.plan_cores", lambda *_, **__: plan((0,), (1,)))

    def given(*argv):
        config = door(model, "-pp", "2", "--max-model-len", "256", *argv)
        decided = decide(config)
        decided.apply()
        return config.cache_config.kv_cache_memory_bytes

    assert 0.39 * 6 / 2 * GIB < given() < 0.4 * 6 / 2 * GIB, "less than without the weights"
    assert given("--kv-cache-memory-bytes", f"{GIB}") == GIB
    assert given("--gpu-memory-utilization", "0.2") is None
    with pytest.raises(ResourceError, match=r"--gpu-memory-utilization 0\.9.* node 0, .* 6\.0 GiB"):
        given("--gpu-memory-utilization", "0.9")
    with pytest.raises(ResourceError, match=r"--kv-cache-memory-bytes.* 7\.0 GiB .* 6\.0 GiB free"):
        given("--kv-cache-memory-bytes", f"{7 * GIB}")
    with pytest.raises(ConfigError, match=r"--max-model-len 256: one request .* at most"):
        given("--kv-cache-memory-bytes", f"{1 << 16}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert given() == 2 * GIB


def args(**more):
    values = {"distributed_executor_backend": None, "additional_config": {}}
    return argparse.Namespace(**values | more)


def test_settings_of_the_command_line_join_those_of_additional_config():
    given = args(additional_config={"other": 1, "sipipe": {"inflight": 4}})
    arguments.use_sipipe(given, {"samplers": 2})
    assert given.additional_config == {"other": 1, "sipipe": {"inflight": 4, "samplers": 2}}
    assert given.distributed_executor_backend == "sipipe.Executor"


@pytest.mark.parametrize(
    ("more", "settings", "words"),
    [
        ({"distributed_executor_backend": "mp"}, {}, "--distributed-executor-backend is mp"),
        ({"additional_config": {"sipipe": {"samplers": 1}}}, {"samplers": 2}, "give it once"),
        (
            {"additional_config": {"sipipe": {"hosts": {"address": "a", "stages": [1, 1]}}}},
            {"hosts": {"count": 2, "address": "b"}},
            '"hosts.address" is .b. on the command line and .a. in .*: give it once',
        ),
        ({"additional_config": {"sipipe": {"sampler": 1}}}, {}, 'did you mean "samplers"'),
        ({"additional_config": {"sipipe": 3}}, {}, "must be an object"),
    ],
)
def test_contradictions_are_named(more, settings, words):
    with pytest.raises(ConfigError, match=words):
        arguments.use_sipipe(args(**more), settings)


def test_cores_by_hand_may_be_any_of_the_mask(model, monkeypatch):
    """A container's limit is of time: which CPUs it leaves a plan follows from its host's name."""
    monkeypatch.setattr("sipipe.cores.quota", lambda: 1.0)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    cores = {"stages": [[cpu] for cpu in cpus]}
    words = ("-pp", str(len(cpus)), "--additional-config", json.dumps({"sipipe": {"cores": cores}}))
    made = decide(config_of(model, *words, "--max-model-len", "256"))
    assert made.cores.workers == tuple(((cpu,),) for cpu in cpus)


def test_vllms_own_refusals_are_one_line(model):
    with pytest.raises(ConfigError) as caught:
        config_of(model, "-tp", "3")
    assert "\n" not in str(caught.value)
    assert "attention heads" in str(caught.value)


@pytest.mark.parametrize("words", [["-sc", '{"method": "ngram"}'], ["--spec-method", "ngram"]])
def test_drafts_by_prompt_lookup_need_no_further_word(model, words, monkeypatch):
    monkeypatch.setattr("sipipe.engine.start.plugin.take_every_parameter", lambda: None)  # for good
    config = config_of(model, *words, "--max-model-len", "256").speculative_config
    assert (config.num_speculative_tokens, config.prompt_lookup_max) == (16, 4)


def test_the_core_plan_and_the_shared_memory_are_printed(model, capsys, monkeypatch):
    decided = decide(config_of(model, "-pp", "2", "--max-model-len", "256"))
    first = decided.cores.workers[0][0]
    monkeypatch.setattr(cpu_features, "slow", lambda: False)
    monkeypatch.setattr("sipipe.engine.setup.describe.claimed", lambda: {first[0], 4000})
    launch.announce(decided)
    assert f"another engine is bound to {first[0]} too" in capsys.readouterr().err
    monkeypatch.setattr("sipipe.engine.setup.describe.claimed", set)
    launch.announce(decided)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("core plan: stage 0: core")
    assert "sampler" in lines[1]
    assert lines[2].startswith("shared memory: ")
    for part in ("iterations", "logits", "hidden states", "metrics"):
        assert part in lines[2]
    assert lines[3].startswith("Output projection")
    assert len(lines) == 4


def test_the_engine_knows_what_a_command_of_ours_has_said(model, capsys):
    plugin.register()
    assert not by_vllm(model, "-pp", "2", "--max-model-len", "256").announced
    launch.announce(decide(by_sipipe(model, "-pp", "2", "--max-model-len", "256")))
    announced = by_vllm(model, "-pp", "2", "--max-model-len", "256")
    assert pickle.loads(pickle.dumps(announced)).announced


def test_a_server_that_is_started_again_does_not_need_who_read_its_log(model, monkeypatch):
    class Unread(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Unread())
    launch.announce(decide(config_of(model, "-pp", "2", "--max-model-len", "256")))
    tell("nor does what comes later")


def test_assertions_of_vllms_are_refusals_and_ours_are_not():
    def refuse():
        raise AssertionError("must be ray or mp")

    with pytest.raises(ConfigError, match="AssertionError: must be ray or mp"):
        checked(refuse)
    ours = {"__name__": "sipipe.engine.somewhere"}
    exec("def fail():\n    raise AssertionError('a bug')", ours)
    with pytest.raises(AssertionError, match="a bug"):
        checked(ours["fail"])


def test_a_line_is_one_whatever_it_repeats(capsys):
    tell("--chat-template a\nb\rc: cannot be read\n")
    assert capsys.readouterr().err == "sipipe: --chat-template a b c: cannot be read\n"


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("nnodes: 2", "nnodes"),
        ("node-rank: 1", "node-rank"),
        ("headless: true", "headless"),
        ("pp: 2", "pp"),
        ("tp: 2", "tp"),
        ("restart: true", "restart"),
    ],
)
def test_an_option_that_sipipe_takes_is_none_of_a_configs_file(model, tmp_path, text, option):
    """vLLM would go on without it, or refuse it for another reason."""
    file = tmp_path / "serve.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=rf"^--{option} is read on the command line alone"):
        launch.serve([model, "--config", str(file)], {}, started=pytest.fail)


def test_too_little_memory_is_said_before_the_start(model, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    with pytest.raises(
        ResourceError, match=r"memory has 1\.0 MiB free, too little for .*iterations"
    ) as it:
        launch.announce(decide(config_of(model, "-pp", "2", "--max-model-len", "256")))
    assert "--max-num-seqs" in str(it.value)
    assert "\n" not in str(it.value)


def answered(status):
    return SimpleNamespace(status_code=status, headers={}, request=None)


class ReadsIt(BaseException):
    """Which nobody takes for a refusal."""


def read(*_, **__):
    raise ReadsIt


NOT_FOUND = RepositoryNotFoundError("404", response=answered(404))
BUSY = HfHubHTTPError("503", response=answered(503))


@pytest.mark.parametrize("door", [by_sipipe, by_vllm, by_python])
@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (NOT_FOUND, ConfigError),
        (gaierror("Name or service not known"), ResourceError),
        (BUSY, None),
        ("it is there", None),
    ],
)
def test_a_directory_that_is_not_there_is_looked_for_on_the_hub_once(
    tmp_path, monkeypatch, door, answer, refused
):
    """Not six times, for half a minute, as vLLM does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    asked = []

    def ask(name, timeout):
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer

    monkeypatch.setattr(checkpoint, "model_info", ask)
    plugin.register()
    monkeypatch.setattr(EngineArgs.create_engine_config, "__wrapped__", read)
    with pytest.raises(refused or ReadsIt) as caught:
        door("models/tinny")
    assert set(asked) == {"models/tinny"}
    if refused:
        assert len(asked) == 1
        assert str(caught.value) == (
            'MODEL "models/tinny" cannot be read: there is no such directory, nor was it found on '
            'the hub; did you mean "models/tiny"?'
        )


def test_a_name_that_can_only_be_the_hubs_is_not_asked_for(tmp_path, monkeypatch):
    """Nor one that was loaded before, or that another hub has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    monkeypatch.setattr(checkpoint, "model_info", lambda *_, **__: 1 / 0)
    for name in ("", "gpt2", "other/model", "s3://bucket/org"):
        checkpoint.ask_hub(name)
    with pytest.raises(OSError, match="nor was it found"):
        checkpoint.ask_hub("org/model:Q4_K_M")
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    monkeypatch.setattr(checkpoint.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint.ask_hub("org/model:Q4_K_M")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    checkpoint.ask_hub("org/another")


PORT = "the port that the test holds"


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
@pytest.mark.parametrize(
    ("wrong", "said"),  # of each kind one: all are in tests/cli/wrong_usages.py
    [
        (["--pp", "99"], "--pp 99: the model has 4 layers"),
        (["--pp", "two"], "--pp: must be a whole number from 1 to 10000"),
        (["--max-model-length", "9"], "did you mean --max-model-len?"),
        (["--max-model-len", "9999999"], "max_model_len"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_option_is_one_line_before_anything_starts(
    model, capsys, monkeypatch, command, wrong, said
):
    monkeypatch.setattr("sipipe.cli.bench.measured", measured_here)
    monkeypatch.setattr("sipipe.cli.serve.supervise", served_here)
    argv = [command, model, *wrong, *(["hello"] if command == "generate" else [])]
    assert main(argv) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# In the processes that the commands start it is said by the same functions.
def served_here(arguments, restart, follows):
    return launch.serve(*arguments, started=lambda _: pytest.fail("it would start"))


def measured_here(name, job, module, timeout):
    words = job["command"][job["command"].index("serve") + 1 :]
    return launch.serve(words, {}, started=lambda _: pytest.fail("it would start"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve"], "serve: name the MODEL"),
        (["serve", "no/such-model"], 'MODEL "no/such-model" cannot be read'),
        (["serve", "/no/such"], 'MODEL "/no/such": there is no such directory'),
        (["generate"], "generate: name the MODEL"),
        (["generate", "no/such-model", "hi"], 'MODEL "no/such-model" cannot be read'),
        (["bench", "./no-such"], 'MODEL "./no-such": there is no such directory'),
        (["generate", "./no-such", "hi"], 'MODEL "./no-such": there is no such directory'),
        (["serve", "MODEL", "--port", PORT], "Address already in use"),
        (["serve", "MODEL", "--trace", "/dev/null/traces"], "trace: cannot write to"),
        (["generate", "MODEL", "--trace", "/dev/null/traces", "hello"], "trace: cannot write to"),
        (["generate", "MODEL", "--top-p", "2", "hello"], "--top-p: must be a number"),
        (
            ["generate", "MODEL", "--max-tokens", "0", "hello"],
            "--max-tokens: must be a whole number",
        ),
        (["generate", "MODEL", "--max-tokns", "3", "hello"], "did you mean --max-tokens?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_before_anything_starts(model, capsys, monkeypatch, argv, said):
    # The hub may be behind a network that is not there.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sipipe.cli.serve.supervise", served_here)
    monkeypatch.setattr("sipipe.cli.bench.measured", measured_here)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        values = {"MODEL": model, PORT: str(taken.getsockname()[1])}
        assert main([values.get(word, word) for word in argv]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error.splitlines()[-1]
    if "--trace" in argv:
        assert error.count("\n") == 1
