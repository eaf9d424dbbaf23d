"""Setup of an engine: the GPUs of its workers, and which of vLLM's runners it has."""

import dataclasses
import multiprocessing
import os
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.platforms import interface
from vllm.v1.worker import gpu_worker

from sipipe.config import CorePlacement, HostSettings, SiPipeConfig
from sipipe.engine import executor, link_opener
from sipipe.engine.layers.vocabulary import Vocabulary
from sipipe.engine.setup import decide as deciding
from sipipe.engine.setup import record as setup
from sipipe.errors import ConfigError, StallError
from sipipe.gpu_slices import slice_for_worker
from sipipe.kv_files import settings as kv_files


def executor_config(**parallel):
    """The parts of vLLM's configuration that the executor reads by itself."""
    parts = [
        "model",
        "cache",
        "load",
        "lora",
        "device",
        "speculative",
        "observability",
        "kv_transfer",
    ]
    config = SimpleNamespace(**{f"{part}_config": None for part in parts})
    config.parallel_config = SimpleNamespace(
        **{"placement_group": None, "data_parallel_index": 0, "worker_extension_cls": ""} | parallel
    )
    config.scheduler_config = SimpleNamespace(get_scheduler_cls=lambda: None, scheduler_cls=None)
    return config


def no_self_test(_):
    """The self-test of a family that is verified."""
    return SimpleNamespace(begin=lambda: None, compare=lambda *_: None)


@pytest.fixture(autouse=True)
def no_filters(monkeypatch):
    """No executor puts filters into loggers, where they would stay in this process."""
    monkeypatch.setattr(executor, "leave_out_what_is_wrong", lambda **_: None)
    monkeypatch.setattr(executor, "shorten", lambda **_: None)


@pytest.fixture
def on_gpu(monkeypatch):
    """A host that shows two GPUs."""
    gpus = SimpleNamespace(is_cpu=lambda: False, get_all_device_numa_nodes=lambda: [1, 0])
    monkeypatch.setattr(setup, "current_platform", gpus)
    monkeypatch.setattr(deciding, "current_platform", gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("devices", "degrees"),
    [(None, (2, 1)), ((0, 0), (2, 1)), ((1, 0), (2, 1)), ((0, 1, 0, 1), (2, 2))],
)
def test_stages_may_share_gpus(on_gpu, devices, degrees):
    deciding.check_devices(SiPipeConfig(devices=devices), *degrees)


@pytest.mark.parametrize(
    ("devices", "degrees", "word"),
    [
        ((0,), (2, 1), "each of the 2 workers"),
        ((0, 0, 1, 1), (2, 2), "NCCL"),
        ((3, 1), (2, 1), "shows 2"),
    ],
)
def test_devices_that_cannot_be_are_refused_in_one_line(on_gpu, devices, degrees, word):
    with pytest.raises(ConfigError, match=word) as error:
        deciding.check_devices(SiPipeConfig(devices=devices), *degrees)
    assert '"devices"' in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("degrees", [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    ("visible", "said"),
    [(None, "and it shows 2: "), ("4,5", 'and CUDA_VISIBLE_DEVICES="4,5" shows 2: ')],
)
def test_more_workers_than_gpus_are_refused_by_what_the_user_gave(
    on_gpu, monkeypatch, visible, said, degrees
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=r"need \d GPUs on this host, .*\"devices\"") as error:
        deciding.check_devices(SiPipeConfig(), *degrees)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("visible", "settings", "degrees", "said"),
    [
        ("MIG-a", {}, (2, 1), 'need 2 GPUs on this host, and CUDA_VISIBLE_DEVICES="MIG-a" shows 1'),
        ("MIG-a,MIG-a", {}, (2, 1), '="MIG-a,MIG-a" shows 1'),
        ("MIG-a,0,MIG-b", {}, (2, 1), '="MIG-a,0,MIG-b" shows 1'),
        ("MIG-a,MIG-b", {"devices": [0, 2]}, (2, 1), '="MIG-a,MIG-b" shows 2'),
        ("MIG-a,MIG-b", {}, (1, 2), "--tensor-parallel-size 2: CUDA_VISIBLE_DEVICES="),
        ("MIG-a,MIG-b", {"transport": "cuda_ipc"}, (2, 1), '"transport" is "cuda_ipc"'),
        ("MIG-a,MIG-b", {}, (2, 1), ""),
        ("MIG-a,MIG-b", {"devices": [1, 0]}, (2, 1), ""),
        ("MIG-a", {"devices": [0, 0]}, (2, 1), ""),
    ],
)
def test_slices_are_counted_by_their_names_and_refused_by_the_variable(
    on_gpu, monkeypatch, visible, settings, degrees, said
):
    """CUDA itself would say that there is one, whatever is named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = SiPipeConfig.from_dict(settings)
    if not said:
        deciding.check_devices(config, *degrees)
        return
    with pytest.raises(ConfigError) as error:
        deciding.check_devices(config, *degrees)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


class Cuda(interface.Platform):
    """vLLM's CUDA platform, as far as it knows numbers. The CPU build cannot import it."""

    device_control_env_var = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "devices", "stages", "replica"),
    [
        ("", (3, 1), 4, 0),
        ("", (0, 0), 4, 0),
        ("4,5", (1, 0), 4, 0),
        ("4,5", (0, 0), 4, 0),
        ("", (3, 1, 0, 2), 2, 1),
    ],
)
def test_vllms_gpu_worker_finds_its_gpu_where_others_are_on_other_hosts_or_of_other_replicas(
    monkeypatch, visible, devices, stages, replica
):
    """Its own lookup, as far as the GPU itself: two stages on this host. Numbers are of the GPUs that
    are visible."""
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(setup, "current_platform", Cuda)
    monkeypatch.setattr(deciding, "current_platform", Cuda)
    monkeypatch.setattr(gpu_worker, "current_platform", Cuda)
    taken = []

    def reached(device):
        taken.append(device)
        raise InterruptedError

    monkeypatch.setattr(torch.accelerator, "set_device_index", reached)
    parallel = ParallelConfig()
    parallel.pipeline_parallel_size = parallel.world_size = stages
    parallel.data_parallel_rank_local = replica
    setup.assign_devices(SimpleNamespace(parallel_config=parallel), devices)
    for local_rank in range(2):
        worker = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=parallel,
            local_rank=local_rank,
        )
        with pytest.raises(InterruptedError):
            gpu_worker.Worker.init_device(worker)
    assert taken == [torch.device("cuda", gpu) for gpu in devices[-2:]]


class Nvml:
    """Four slices of two GPUs. A slice's own number is within its GPU, as NVML says it."""

    SLICES: ClassVar = {"MIG-a": (0, 0), "MIG-b": (0, 1), "MIG-c": (1, 0), "MIG-d": (1, 1)}
    inits = 0

    def nvmlInit(self):
        self.inits += 1

    def nvmlShutdown(self):
        self.inits -= 1

    def nvmlDeviceGetHandleByUUID(self, name):
        assert self.inits
        return self.SLICES[name]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return handle[:1]

    def nvmlDeviceGetIndex(self, handle):
        return handle[-1]


@pytest.mark.parametrize("visible", ["MIG-a,MIG-b", "MIG-d,MIG-b", "MIG-b,MIG-d,MIG-c"])
@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("replica", [0, 1])
def test_vllms_gpu_worker_finds_its_slice_which_is_the_only_one_that_it_sees(
    monkeypatch, visible, devices, replica
):
    """The engine assigns slices in an environment with every name. A worker looks its own one up by the
    variable that it is started with."""

    class Slices(Cuda):
        device_control_id_to_physical_device_id = classmethod(lambda *_: pytest.fail("NVML's"))

    nvml = Nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(setup, "current_platform", Slices())
    monkeypatch.setattr(setup, "import_pynvml", lambda: nvml)
    monkeypatch.setattr(gpu_worker, "current_platform", Slices())
    taken = []

    def reached(device):
        taken.append(device)
        raise InterruptedError

    monkeypatch.setattr(torch.accelerator, "set_device_index", reached)
    parallel = ParallelConfig()
    parallel.pipeline_parallel_size = parallel.world_size = 2
    parallel.data_parallel_rank_local = replica
    every = (*devices, *devices) if replica else devices
    setup.assign_devices(SimpleNamespace(parallel_config=parallel), every)
    for local_rank in range(2):
        monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
        variables = slice_for_worker(2 * replica + local_rank, every)
        assert variables == {
            "CUDA_VISIBLE_DEVICES": visible.split(",")[every[2 * replica + local_rank]]
        }
        with monkeypatch.context() as started:
            started.setenv("CUDA_VISIBLE_DEVICES", variables["CUDA_VISIBLE_DEVICES"])
            worker = SimpleNamespace(
                device_config=SimpleNamespace(device_type="cuda"),
                parallel_config=parallel,
                local_rank=local_rank,
            )
            with pytest.raises(InterruptedError):
                gpu_worker.Worker.init_device(worker)
    assert taken == [torch.device("cuda", 0)] * 2
    assert nvml.inits == 0


@pytest.mark.parametrize(
    ("hosts", "reach", "says"),
    [
        ({}, "rdma", "this engine has one"),
        ({"count": 2}, "rdma", r'"hosts.encrypt_links" is true: set it false on all hosts'),
        (
            {"count": 2, "encrypt_links": False},
            "",
            r'not installed on this host: pip install "sipipe',
        ),
        ({"count": 2, "encrypt_links": False}, "tcp", None),
    ],
)
def test_nixl_is_refused_where_it_can_join_nothing(monkeypatch, hosts, reach, says):
    monkeypatch.setattr(deciding, "nixl_reach", lambda: reach)
    config = SiPipeConfig(transport="nixl", hosts=HostSettings(**hosts))
    if says is None:
        deciding.check_nixl(config)
        return
    with pytest.raises(ConfigError, match=f'"transport" is "nixl".*{says}'):
        deciding.check_nixl(config)


def test_cpus_have_no_devices():
    with pytest.raises(ConfigError, match="runs on CPUs"):
        deciding.check_devices(SiPipeConfig(devices=(0, 0)), 2, 1)
    with pytest.raises(ConfigError, match='"transport" is "cuda_ipc"'):
        deciding.check_devices(SiPipeConfig(transport="cuda_ipc"), 2, 1)


def test_nodes_are_vllms_word(on_gpu, monkeypatch):
    monkeypatch.setattr(deciding, "get_auto_numa_nodes", lambda: [0, 0, 1, 1])
    assert deciding.numa_nodes((3, 0, 9)) == [1, 0, None]
    monkeypatch.setattr(deciding, "get_auto_numa_nodes", lambda: None)
    assert deciding.numa_nodes(range(2)) == [1, 0], "in a container that may not bind memory"
    deciding.current_platform.get_all_device_numa_nodes = lambda: None
    assert deciding.numa_nodes(range(2)) == [None, None]


def test_an_engine_on_cpus_asks_nobody_for_nodes(monkeypatch):
    monkeypatch.setattr(deciding, "get_auto_numa_nodes", lambda: 1 / 0)
    assert deciding.numa_nodes(range(2)) == [None, None]


def make_executor(monkeypatch, decided, pipeline, kv_transfer_config=None):
    """An executor for which everything is ``decided``, whose processes are stood for by ``pipeline``."""
    decided.apply = lambda: None
    decided.stages = 2
    decided.vllm_config = SimpleNamespace(announced=True)

    def make_pipeline(_setup, _hosts, has_failed):
        pipeline.has_failed = has_failed
        return pipeline

    monkeypatch.setattr("sipipe.engine.pipeline.Pipeline", make_pipeline)
    monkeypatch.setattr("sipipe.engine.hosts.remote.meet", lambda _: [])
    monkeypatch.setattr("sipipe.engine.self_test.self_test.SelfTest", no_self_test)
    monkeypatch.setattr(executor, "decide", lambda _: decided)
    monkeypatch.setattr(executor, "describe_setup", lambda _: [])
    monkeypatch.setattr(executor, "claim", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(executor, "set_torch_threads_for_runtime", lambda: None)
    config = executor_config()
    config.kv_transfer_config = kv_transfer_config
    return executor.Executor(config)


def test_a_configuration_that_was_made_without_the_plugin_is_refused_by_that():
    with pytest.raises(ConfigError, match="made without SiPipe's plugin"):
        executor.Executor(executor_config())


def test_a_start_that_fails_late_ends_what_it_has_started(monkeypatch):
    """A process that vLLM forks ends without Python's own end, and vLLM has not got the executor yet,
    so that nobody calls it."""
    reading, writing = os.pipe()

    pipeline = SimpleNamespace(load=lambda: None, close=lambda: os.write(writing, b"closed"))

    def start():
        executors.append(make_executor(monkeypatch, SimpleNamespace(cores=None), pipeline))
        raise SystemExit(1)

    executors = []
    core = multiprocessing.get_context("fork").Process(target=start)
    core.start()
    core.join(60)
    os.close(writing)
    assert os.read(reading, 100) == b"closed"
    os.close(reading)


@pytest.mark.parametrize(
    ("announced", "replica", "said"), [(False, 0, 2), (False, 1, 2), (True, 0, 0), (True, 1, 2)]
)
def test_what_the_user_has_read_in_the_foreground_is_not_said_again(
    monkeypatch, announced, replica, said
):
    """There it is what the first replica does."""
    logged = []
    decided = SimpleNamespace(apply=lambda: None, cores=None, stages=2)
    decided.vllm_config = SimpleNamespace(announced=announced)
    monkeypatch.setattr(executor, "decide", lambda _: decided)
    monkeypatch.setattr(executor, "describe_setup", lambda _: ["a", "b"])
    monkeypatch.setattr(executor.logger, "info", lambda _, line: logged.append(line))
    monkeypatch.setattr(executor, "claim", lambda _: 1 / 0)  # what follows
    with pytest.raises(ZeroDivisionError):
        executor.Executor(executor_config(data_parallel_index=replica))
    assert len(logged) == said


@pytest.fixture
def sharing_executor(monkeypatch):
    """An executor that has opened a pipeline whose stages share the output projection."""
    decided = SimpleNamespace(cores=None, bind_scheduler=lambda _: None)
    answered = SimpleNamespace(result=lambda _: [])
    pipeline = SimpleNamespace(
        load=lambda: None,
        close=lambda: None,
        open=lambda: SimpleNamespace(vocabulary=Vocabulary((0.5, 0.5)), setup=decided),
        observed=lambda scheduler: scheduler,
        resolver=SimpleNamespace(thread=SimpleNamespace(native_id=1)),
        dispatcher=SimpleNamespace(publish_all=lambda: None),
        calls=SimpleNamespace(call=lambda *_: answered),
    )
    made = make_executor(monkeypatch, decided, pipeline)
    made.compile_or_warm_up_model()
    return made


def test_what_was_started_ends_where_the_end_of_the_start_fails(monkeypatch):
    """In a program's own process nobody else ends it (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
    closed = []

    def fail():
        raise StallError("a link does not open")

    pipeline = SimpleNamespace(
        load=lambda: None,
        close=lambda: closed.append(True),
        open=fail,
        calls=SimpleNamespace(call=lambda *_: SimpleNamespace(result=lambda _: [])),
    )
    made = make_executor(monkeypatch, SimpleNamespace(cores=None), pipeline)
    with pytest.raises(StallError, match="a link does not open"):
        made.compile_or_warm_up_model()
    assert closed


def test_a_failure_amid_the_registration_of_its_callback_is_told(monkeypatch):
    """Another thread's failure comes just when the registration has looked whether there is one."""
    pipeline = SimpleNamespace(load=lambda: None, close=lambda: None, fail=lambda _: None)
    made = make_executor(monkeypatch, SimpleNamespace(cores=None), pipeline)
    monkeypatch.setattr(executor, "leave_last_word", lambda _: None)
    failures = [None]
    failing = threading.Thread(target=pipeline.has_failed, args=(RuntimeError("a stage died"),))

    def look(_):
        failure = failures[-1]
        if failing.ident is None:
            failing.start()
            failing.join(0.2)  # where nothing holds it up, it is through
        return failure

    told = threading.Event()
    monkeypatch.setattr(
        executor.Executor,
        "_failure",
        property(look, lambda _, failure: failures.append(failure)),
        raising=False,
    )
    made.register_failure_callback(told.set)
    assert told.wait(60)
    failing.join()


class Extension:
    """A class of ``--worker-extension-cls``."""

    def take_weights(self):
        """Change the weights, perhaps."""


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        *((method, False) for method in executor.CHANGE_WEIGHTS),
        ("apply_model", False),
        (len, False),
        ("take_weights", False),
        ("add_lora", True),
        ("list_loras", True),
    ],
)
def test_caches_in_files_are_kept_apart_from_where_weights_may_have_changed(
    monkeypatch, method, kept
):
    """Other servers would load the new weights' caches as those of the old ones. What is scheduled from
    the call on runs behind it, also where nobody waits for its answer."""
    happened = []
    answer = SimpleNamespace(result=lambda _: happened.append("answered") or [])
    calls = SimpleNamespace(call=lambda *_: happened.append("called") or answer)
    pipeline = SimpleNamespace(
        load=lambda: None, close=lambda: None, calls=calls, resolver=SimpleNamespace()
    )
    transfer = SimpleNamespace(kv_connector_module_path=kv_files.MODULE)
    made = make_executor(monkeypatch, SimpleNamespace(cores=None), pipeline, transfer)
    made.parallel_config.worker_extension_cls = f"{__name__}.Extension"
    connector = SimpleNamespace(
        reset_cache=lambda: happened.append("reset"), get_finished_count=lambda: 1
    )
    made.parallel_config.world_size = 1
    made.init_kv_output_aggregator(connector)
    assert made.collective_rpc(method) == []
    assert happened == (["called", "answered"] if kept else ["called", "reset", "answered"])


def test_weights_do_not_change_beside_a_shared_output_projection(sharing_executor):
    for method in executor.CHANGE_WEIGHTS:
        with pytest.raises(ConfigError, match=rf'{method}: .* set "vocabulary": "last"'):
            sharing_executor.collective_rpc(method)


@pytest.mark.parametrize(
    ("method", "warned"), [("apply_model", True), (len, True), ("add_lora", False)]
)
def test_a_function_may_change_them_and_is_warned_of(monkeypatch, sharing_executor, method, warned):
    warnings = []
    monkeypatch.setattr(executor.logger, "warning_once", warnings.append)
    assert sharing_executor.collective_rpc(method) == []
    assert ['"vocabulary": "last"' in text for text in warnings] == [True] * warned


def test_where_vllms_sampler_draws_nothing_is_shared():
    fields = dict.fromkeys((field.name for field in dataclasses.fields(setup.Setup)), None)
    made = setup.Setup(**fields | {"reason": "", "vocabulary": Vocabulary((0.5, 0.5))})
    fallen = made.on_device("the stage runner does not take it")
    assert (fallen.vocabulary.parts, fallen.path) == ((), "device")
    assert made.path == "sipipe"


PLACED = CorePlacement(scheduler=(0,))


@pytest.mark.parametrize(
    ("name", "asked", "shared", "bound"),
    [
        ("EngineCore", "auto", False, True),
        ("EngineCore", "auto", True, False),
        ("EngineCore", PLACED, True, True),  # where its user wants it, beside others too
        ("ForkPoolWorker-1", PLACED, False, False),
    ],
)
def test_a_users_process_is_not_bound(monkeypatch, name, asked, shared, bound):
    fields = dict.fromkeys((field.name for field in dataclasses.fields(setup.Setup)), None)
    cores = SimpleNamespace(scheduler=(0,), shared=shared)
    config = SiPipeConfig(cores=asked)
    done = []
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    monkeypatch.setattr(setup, "run_soon", lambda: done.append("soon"))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: done.append(given))
    setup.Setup(**fields | {"cores": cores, "config": config}).bind_scheduler(77)
    of_ours = ["soon"] * (name == "EngineCore")
    assert done == of_ours + [(0, (0,)), (77, (0,))] * bound


def test_links_of_final_hidden_states_go_from_the_last_stage_to_all_others():
    made = SimpleNamespace(stages=3, ranks=2, slots=4, config=SiPipeConfig(), rows=8)
    links = link_opener.make_final_links(made, "shm", "cpu")
    names = {pair: link.name for pair, link in links.items()}
    assert names == {
        (4, 0): "final2-0.r0",
        (5, 1): "final2-0.r1",
        (4, 2): "final2-1.r0",
        (5, 3): "final2-1.r1",
    }
