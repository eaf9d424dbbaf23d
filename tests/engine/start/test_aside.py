"""One stage on a GPU: vLLM's own executor runs it, by every door, unless SiPipe is asked for.

The build is a CPU's. What stands for a GPU is the platform that ``sipipe.engine.start.aside`` asks;
in other processes a plugin of vLLM puts it there (:func:`gpu_plugin`).
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model
from tests.engine.engines import engine_environment, kill
from tests.engine.servers import Server
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sipipe.config import ONLY_SIPIPE_HAS, STEPS_ASIDE, SiPipeConfig
from sipipe.engine.executor import Executor
from sipipe.engine.scheduling.scheduler import PipelineScheduler
from sipipe.engine.setup.vllm_config import PipelineVllmConfig
from sipipe.engine.start import arguments, aside, generate, launch, plugin
from sipipe.errors import ConfigError, SiPipeError

on_cpus = pytest.mark.skipif(
    not arguments.current_platform.is_cpu(), reason="a CUDA build of vLLM needs its GPU here"
)
SHORT = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
WORDS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]

GIVEN = {
    "samplers": 1,
    "inflight": 1,
    "cpu_sampling": "on",
    "scheduler": "vllm",
    "microbatches": {},
    "layers": "auto",
    "vocabulary": "last",
    "devices": [0],
    "hosts": {"count": 2, "address": "10.0.0.1"},
    "cores": "off",
    "trace": "traces",
    "stall_timeout": 60,
    "start_timeout": 60,
    "grammar_timeout": 60,
    "kv_loss": 0.2,
    "transport": "shm",
    "trace_limit": 64,
    "self_test": "off",
}
"""A value of each setting."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def on_gpu(monkeypatch):
    plugin.register()
    monkeypatch.setattr(plugin, "announced", False)
    monkeypatch.setattr(aside, "current_platform", SimpleNamespace(is_cpu=lambda: False))


@pytest.fixture
def heard():
    """Lines of SiPipe's in the log of vLLM."""
    configure_logging_from_args(argparse.Namespace())  # which would take the handler away
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.sipipe")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def asked(**more):
    """``EngineArgs`` as far as they are looked at."""
    given = {
        "additional_config": {},
        "pipeline_parallel_size": 1,
        "speculative_config": None,
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "scheduler_cls": None,
    }
    return SimpleNamespace(**(given | more))


@on_cpus
def test_on_cpus_sipipe_runs_one_stage():
    assert not aside.steps_aside(asked())


def test_several_stages_are_sipipes(on_gpu):
    assert aside.steps_aside(asked())
    assert not aside.steps_aside(asked(pipeline_parallel_size=2))


def test_every_setting_has_been_thought_of():
    assert GIVEN.keys() == set(SiPipeConfig.__struct_fields__)


@pytest.mark.parametrize("name", GIVEN)
def test_settings_that_only_sipipe_heeds_have_it_run_the_model(on_gpu, name):
    for settings in ({name: GIVEN[name]}, {**GIVEN, name: GIVEN[name]}):
        wanted = bool(settings.keys() & ONLY_SIPIPE_HAS)
        assert aside.steps_aside(asked(additional_config={"sipipe": settings})) is not wanted


def test_what_is_null_or_elsewhere_asks_for_nothing(on_gpu):
    for config in ({"sipipe": {"trace": None}}, {"sipipe": {}}, {"sipipe": None}, {"other": 1}):
        assert aside.steps_aside(asked(additional_config=config)), config


def test_wrong_settings_are_refused_before_anybody_steps_aside(on_gpu):
    with pytest.raises(ConfigError, match="sampler"):
        aside.steps_aside(asked(additional_config={"sipipe": {"sampler": 2}}))


class OwnScheduler(PipelineScheduler):
    """A user's."""


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"speculative_config": {"method": "ngram"}}, True),
        ({"speculative_config": {"prompt_lookup_max": 3}}, True),
        ({"spec_method": "ngram"}, True),
        ({"spec_method": "ngram", "spec_tokens": 3}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
        ({"speculative_config": {"method": "eagle3", "model": "m"}}, False),
        ({"scheduler_cls": OwnScheduler}, True),
        ({"scheduler_cls": "sipipe.engine.scheduling.scheduler.PipelineScheduler"}, True),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, False),
        ({"scheduler_cls": "there.is.None"}, False),
    ],
)
def test_arguments_that_only_sipipe_serves_have_it_run_the_model(on_gpu, more, wanted):
    assert aside.steps_aside(asked(**more)) is not wanted


def test_a_placement_group_of_rays_has_sipipe_run_the_model(on_gpu, monkeypatch):
    for group in (None, object()):
        util = SimpleNamespace(get_current_placement_group=lambda group=group: group)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
        monkeypatch.setattr(aside, "is_in_ray_actor", lambda: True)
        assert aside.steps_aside(asked()) is (group is None)


@on_cpus
@pytest.mark.parametrize("backend", ["sipipe", "sipipe.Executor", Executor])
def test_vllms_configuration_is_stocks_own(on_gpu, model, heard, backend):
    """What ``LLM(...)``, ``AsyncLLM`` and ``vllm serve`` make their engine of."""
    given = {"trace_limit": 64}  # which says nothing of one stage
    other = {"additional_config": {"other": [1]}}
    ours = {"additional_config": {"other": [1], "sipipe": given}}
    stock = EngineArgs(model=model, **SHORT, **other).create_engine_config()
    args = EngineArgs(model=model, **SHORT, **ours, distributed_executor_backend=backend)
    made = args.create_engine_config()
    assert type(made) is VllmConfig
    assert made.compute_hash() == stock.compute_hash()
    names = [name for name in vars(stock) if name != "instance_id"]
    assert {name: str(getattr(made, name)) for name in names} == {
        name: str(getattr(stock, name)) for name in names
    }
    assert given == {"trace_limit": 64}, "what the user has is left alone"
    assert heard == [f"SiPipe: {STEPS_ASIDE}"]

    args = EngineArgs(
        model=model,
        **SHORT,
        additional_config={"sipipe": {"samplers": "auto"}},
        distributed_executor_backend=backend,
    )
    assert type(args.create_engine_config()) is PipelineVllmConfig


@on_cpus
@pytest.mark.parametrize("more", [[], ["-dp", "2"], ["-tp", "2"], ["--api-key", "secret"]])
def test_sipipe_serve_gives_vllm_the_arguments_of_stocks_own_command(
    on_gpu, model, monkeypatch, capsys, more
):
    served, checked = [], []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(served.append))
    words = [model, *WORDS, "--port", "0", *more]
    assert launch.serve(words, {"trace_limit": 64}, started=checked.append) == 0
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    stock = parser.parse_args(["serve", *words])
    configure_logging_from_args(stock)  # as vLLM's command does
    stock.model = model
    [ours] = served
    assert checked == [ours]
    of_stock = {name: str(value) for name, value in vars(stock).items()}
    assert {name: str(value) for name, value in vars(ours).items()} == of_stock
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sipipe: ")]
    assert said == [f"sipipe: {STEPS_ASIDE}"]


@on_cpus
def test_what_vllm_refuses_is_one_line_there_too(on_gpu, model):
    with pytest.raises(ConfigError, match="max_model_len") as refused:
        launch.serve([model, "--max-model-len", "100000"], {}, started=pytest.fail)
    assert "\n" not in str(refused.value)


def test_generate_says_in_one_line_that_vllms_engine_does_not_start(monkeypatch):
    def fail(_):
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(generate.AsyncLLM, "from_engine_args", fail)
    run = generate.complete(argparse.Namespace(), ["a"], None, False, lambda *_: None)
    with pytest.raises(SiPipeError, match="generate: Engine core initialization failed"):
        run.send(None)


# ---- engines ------------------------------------------------------------------------------------

STANDS_FOR_GPU = """
    from types import SimpleNamespace

    def register():
        from sipipe.engine.start import aside

        aside.current_platform = SimpleNamespace(is_cpu=lambda: False)
"""

LIBRARY = """
    import sys

    if __name__ == "__main__":
        import json

        import psutil
        from vllm import LLM, SamplingParams

        llm = LLM(**json.loads(sys.argv[1]))
        [answer] = llm.generate(["one two three"], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 8
        for process in psutil.Process().children(recursive=True):
            print("PROCESS", " ".join(process.cmdline()))
"""


@pytest.fixture
def gpu_plugin(tmp_path):
    """The environment of processes in which a plugin of vLLM has SiPipe see a GPU."""
    folder = tmp_path / "plugins"
    (folder / "stands_for_gpu-0.dist-info").mkdir(parents=True)
    (folder / "stands_for_gpu.py").write_text(textwrap.dedent(STANDS_FOR_GPU))
    about = folder / "stands_for_gpu-0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stands_for_gpu\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstands_for_gpu = stands_for_gpu:register\n"
    )
    environment = engine_environment()
    path = [str(folder), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "VLLM_CPU_KVCACHE_SPACE": "1"}


def is_sipipes(process: str) -> bool:
    return any(word in process for word in ("sipipe.worker", "sipipe.sampler", "sampler0"))


@on_cpus
@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("settings", [None, {"samplers": 1}])
def test_a_library_has_vllms_processes_and_sipipes_where_it_is_asked(
    gpu_plugin, model, tmp_path, settings
):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LIBRARY))
    given = {"model": model, **SHORT, "distributed_executor_backend": "sipipe.Executor"}
    if settings:
        given["additional_config"] = {"sipipe": settings}
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(given)],
        env=gpu_plugin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    started = [line for line in done.stdout.splitlines() if line.startswith("PROCESS")]
    assert started
    assert any(map(is_sipipes, started)) is bool(settings), started
    said = (done.stdout + done.stderr).count("one stage on a GPU: vLLM's own executor runs it")
    assert said == (0 if settings else 1)


@on_cpus
@pytest.mark.engine
@pytest.mark.ci
def test_generate_completes_by_vllms_own_executor(gpu_plugin, model):
    words = ["generate", model, "one two three", *WORDS, "--max-tokens", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "sipipe", *words],
        env=gpu_plugin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert '"finish_reason": "length"' in done.stdout
    said = [line for line in done.stderr.splitlines() if line.startswith("sipipe: ")]
    assert said == [f"sipipe: {STEPS_ASIDE}"]


@on_cpus
@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("module", ["sipipe", "vllm.entrypoints.cli.main"])
def test_servers_are_vllms_and_end_with_all_they_have_started(gpu_plugin, model, tmp_path, module):
    named = [] if module == "sipipe" else ["--distributed-executor-backend", "sipipe.Executor"]
    log = Path(tmp_path / "log")
    with Server(model, log, *WORDS, *named, "-pp", "1", module=module, more=gpu_plugin) as server:
        everybody = server.everybody()
        commands = [" ".join(process.cmdline()) for process in everybody]
        assert not any(map(is_sipipes, commands)), commands
        assert any("EngineCore" in command for command in commands), commands
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        _, left = psutil.wait_procs(everybody, timeout=30)
        kill(left)
        assert not left
    said = log.read_text()
    assert said.count("one stage on a GPU: vLLM's own executor runs it") == 1, said[-3000:]
    assert "core plan" not in said
