"""Which workers can be forked: those that read nothing else where OpenMP is loaded."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model
from tests.engine.engines import engine_environment

from sipipe import layer_names
from sipipe.cores import Core, plan_cores
from sipipe.engine.children import forking
from sipipe.engine.start import server
from sipipe.ipc.starter import STARTER

SHORTLY = {"GOMP_SPINCOUNT": "10000"}
LIBGOMP = "/torch/lib/libgomp.so.1"


@pytest.fixture
def begun(monkeypatch):
    """What OpenMP had read where this process was to fork from then on."""
    found = []
    monkeypatch.setattr(forking, "_fork_from_here", found.append)
    monkeypatch.setattr(forking, "_loaded", None)
    for name in list(os.environ):
        if name.startswith(("OMP_", "GOMP_", "KMP_")) or name in ("LD_PRELOAD", forking.METHOD):
            monkeypatch.delenv(name)
    monkeypatch.setenv(layer_names.VARIABLE, "0")  # as if the user had set it: it stays
    cpu = type("Vllm", (), {"device": "cpu"})
    monkeypatch.setattr(forking, "installed_vllm", lambda: cpu)
    return found


@pytest.fixture
def read(monkeypatch, begun):
    """Returns the variables that OpenMP reads where vLLM is imported on a machine of ``cores`` cores."""

    def read(cores, argv, settings=None):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        machine = [Core((cpu,)) for cpu in range(cores)]
        monkeypatch.setattr(forking, "this_machine", lambda most: machine)
        before = dict(os.environ)
        with forking.importing(argv, settings or {}, 0):
            variables = dict(os.environ.items() - before.items())
        assert dict(os.environ) == before
        return variables

    return read


@pytest.mark.parametrize(
    ("cores", "stages", "tp", "variables"),
    [
        (2, 2, 1, {"OMP_NUM_THREADS": "1"}),
        (2, 1, 2, {"OMP_NUM_THREADS": "1"}),
        (4, 1, 1, {"OMP_NUM_THREADS": "3", "GOMP_CPU_AFFINITY": "0 1 2"} | SHORTLY),
        (16, 1, 1, {"OMP_NUM_THREADS": "13", "GOMP_CPU_AFFINITY": " ".join(map(str, range(13)))}),
        (16, 2, 1, {}),  # each has cores of its own
    ],
)
def test_what_all_workers_of_a_plan_read(read, cores, stages, tp, variables):
    assert read(cores, ["m", "-pp", str(stages), "-tp", str(tp)]) == variables


@pytest.mark.parametrize(
    ("words", "set_by_user", "value"),
    [
        ([], None, "0"),
        (["--pipeline-parallel-size=1", "-tp", "2"], None, "0"),
        (["-pp", "2"], None, None),
        ([], "1", "1"),
        (["-pp", "many"], None, None),
    ],
)
def test_layers_have_names_of_strings_in_one_stage(monkeypatch, begun, words, set_by_user, value):
    """Workers inherit the variable, since they read it again."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv(layer_names.VARIABLE)
    if set_by_user:
        monkeypatch.setenv(layer_names.VARIABLE, set_by_user)
    with forking.importing(["m", *words], {}, 0):
        assert os.environ.get(layer_names.VARIABLE) == value
    assert os.environ.get(layer_names.VARIABLE) == value


def test_nothing_is_known_of_unbound_workers(read):
    assert read(4, ["m"], {"cores": "off"}) == {}


@pytest.mark.parametrize(
    ("argv", "settings", "workers"),
    [
        (["m", "-pp", "2"], {}, 2),
        (["m", "--pipeline-parallel-size=2", "-tp", "3"], {}, 6),
        (["m"], {}, 1),
        (["m", "-pp", "2", "--data-parallel-size", "2"], {}, 2),
        (["m", "-pp", "two"], {}, 0),
        (["m", "-pp", "2"], {"cores": {"stages": [[0]]}}, 0),  # refused later, in one line
    ],
)
def test_the_plan_is_made_from_the_command_line(monkeypatch, read, argv, settings, workers):
    """All workers of a plan for one core are on that core, with one thread."""
    plans = []

    def plan(*machine, **options):
        plans.append(plan_cores(*machine, **options))
        return plans[-1]

    monkeypatch.setattr(forking, "plan_cores", plan)
    assert read(1, argv, settings) == (forking.ONE_THREAD if workers else {})
    assert sum(len(ranks) for made in plans for ranks in made.workers) == workers


ONE = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "x.so"}
NUMBAS = "llvmlite.binding.ffi"
MORE = {"OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": "0 1", "LD_PRELOAD": ""}


@pytest.mark.parametrize(
    ("loaded", "wanted", "may"),
    [
        (None, ONE, False),
        (ONE, ONE | {"LD_PRELOAD": f"x.so:{LIBGOMP}", "GOMP_CPU_AFFINITY": "5"}, True),
        (ONE, ONE | SHORTLY | {"OTHER": "1"}, True),
        (ONE, ONE | {"LD_PRELOAD": f"x.so:tcmalloc.so:{LIBGOMP}"}, False),
        (ONE, MORE | {"LD_PRELOAD": "x.so"}, False),
        (ONE, {"LD_PRELOAD": "x.so"}, False),  # not bound
        ({"LD_PRELOAD": ""}, {"OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "5"}, True),
        ({"LD_PRELOAD": ""}, MORE, False),
        (MORE, {"OMP_NUM_THREADS": "1"}, True),
        (MORE, MORE | {"LD_PRELOAD": LIBGOMP}, True),
        (MORE, MORE | {"GOMP_CPU_AFFINITY": "1 2"}, False),
        (MORE, MORE | SHORTLY, False),
        (MORE, MORE | {"OMP_WAIT_POLICY": "active"}, False),
    ],
)
def test_a_worker_is_forked_only_where_it_reads_the_same(monkeypatch, loaded, wanted, may):
    monkeypatch.setattr(forking, "_loaded", loaded)
    monkeypatch.delitem(sys.modules, NUMBAS, raising=False)
    there = [threading.main_thread()]
    monkeypatch.setattr(threading, "enumerate", lambda: there)
    assert forking.may_fork(wanted) is may
    there.append(threading.Thread(name=STARTER))
    assert forking.may_fork(wanted) is may, "it sleeps"
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, NUMBAS, sys)
        assert not forking.may_fork(wanted), "which vLLM's worker stumbles over"
    there.append(threading.Thread())
    assert not forking.may_fork(wanted), "which may hold a lock"


@pytest.mark.parametrize("name", ["LD_PRELOAD", forking.METHOD])
def test_the_users_own_libraries_and_method_are_left_alone(monkeypatch, begun, name):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv(name, "libiomp5.so")
    before = dict(os.environ)
    with forking.importing(["m"], {}, 0):
        assert dict(os.environ) == before
    assert not begun


def test_a_torch_that_was_loaded_before_has_read_what_it_read(begun):
    import torch  # noqa: F401

    before = dict(os.environ)
    with forking.importing(["m", "-pp", "2"], {}, 0):
        assert dict(os.environ) == before
    assert not begun


def test_the_server_forks_its_engine_whatever_its_workers_read(monkeypatch, begun, read):
    """Sixteen cores for two stages: each worker is a new interpreter."""
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("OTHER", "2")
    assert read(16, ["m", "-pp", "2"]) == {}
    assert begun == [{"KMP_BLOCKTIME": "1", "LD_PRELOAD": ""}]


ASK = """
import os, sys, threading
from sipipe.engine.children import forking
forking._fork_from_here = lambda loaded: print("forks", loaded)
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's command does
if sys.argv[1:]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
forking.fork_of_vllms()
"""


@pytest.mark.parametrize(
    ("more", "thread", "forks"),
    [
        ({}, False, True),
        ({"OMP_NUM_THREADS": "8"}, False, True),
        ({}, True, False),  # it may hold a lock
        ({forking.METHOD: "spawn"}, False, False),
        ({"LD_PRELOAD": "libiomp5.so"}, False, False),
    ],
)
def test_vllms_server_forks_but_for_the_users_own(more, thread, forks):
    left_out = ("LD_PRELOAD", "OMP_", "GOMP_", "KMP_", forking.METHOD)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    asked = [sys.executable, "-c", ASK]
    if thread:
        asked.append("thread")
    done = subprocess.run(asked, env=environment | more, capture_output=True, text=True, check=True)
    assert done.stdout == (f"forks {more | {'LD_PRELOAD': ''}}\n" if forks else "")


SPAWN = """
import multiprocessing, os, sys, threading

def engine(thread, stages):
    from sipipe.engine.children import forking
    forking._fork_from_here = lambda loaded: print("forks", loaded, flush=True)
    if thread:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    forking.fork_of_engines(stages)
    os._exit(0)  # past the thread

if __name__ == "__main__":
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's CPU platform does
    name, thread, stages = sys.argv[1:]
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(name=name, target=engine, args=(thread == "thread", int(stages)))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("name", "more", "thread", "stages", "forks"),
    [
        ("EngineCore", {}, "", 2, True),
        ("EngineCore_DP1", {"OMP_NUM_THREADS": "8"}, "", 2, True),
        ("EngineCore", {}, "", 1, False),  # its worker imports vLLM otherwise
        ("EngineCore", {}, "thread", 2, False),  # of the user's main module, which is run anew
        ("EngineCore", {forking.METHOD: "spawn"}, "", 2, False),
        ("EngineCore", {"LD_PRELOAD": "libiomp5.so"}, "", 2, False),
        ("Process-1", {}, "", 2, False),  # not vLLM's
    ],
)
def test_an_engine_that_python_spawned_forks_but_for_the_users_own(
    tmp_path, name, more, thread, stages, forks
):
    left_out = ("LD_PRELOAD", "OMP_", "GOMP_", "KMP_", forking.METHOD)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    asked = [sys.executable, str(script), name, thread, str(stages)]
    done = subprocess.run(asked, env=environment | more, capture_output=True, text=True, check=True)
    loaded = forking.ONE_THREAD | {"LD_PRELOAD": ""}  # whatever OpenMP has read: no others fit
    assert done.stdout == (f"forks {loaded}\n" if forks else "")


TELLS = """
import os
import sys

class Told:
    def started_as(self):
        return sys.orig_argv

if __name__ == "__main__":
    from vllm import LLM

    # A core for each stage: one thread needs nothing of OpenMP.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    llm = LLM(
        sys.argv[1],
        distributed_executor_backend="sipipe.Executor",
        pipeline_parallel_size=2,
        worker_extension_cls="script.Told",
        enforce_eager=True,
        max_model_len=256,
    )
    print("TOLD", ["sipipe.worker" in words for words in llm.collective_rpc("started_as")])
    print(llm.generate("Paris", use_tqdm=False)[0].outputs[0].token_ids and "GENERATED")
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("method", ["", "spawn"])
def test_workers_of_a_script_are_forks_of_its_engine(models, tmp_path, method):
    (tmp_path / "script.py").write_text(TELLS)
    environment = engine_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop(forking.METHOD, None)
    environment |= {forking.METHOD: method} if method else {}
    path = make_model("llama", models / "llama")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"TOLD {[bool(method)] * 2}" in done.stdout, done.stdout + done.stderr
    assert "GENERATED" in done.stdout


LOOK = """
import os, sys, threading
from sipipe.engine.children.forking import look_by_fork
anew = lambda look: "anew"
assert look_by_fork(anew, lambda: (os.getppid(), "found")) == (os.getpid(), "found")
try:
    look_by_fork(anew, lambda: 1 / 0)
except RuntimeError as error:
    print(error)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(look_by_fork(anew, lambda: "found"))
"""


def test_a_class_is_looked_at_by_a_fork_and_an_error_there_is_vllms():
    """In a process of its own: other tests may have left threads in this one."""
    looked = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert looked.stdout == "a model's class cannot be imported: its error is above\nanew\n"
    assert "ZeroDivisionError" in looked.stderr


def test_threads_spin_briefly_on_cores_that_others_use_too(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert forking.waiting(shared=False) == {}
    assert forking.waiting(shared=True) == {"GOMP_SPINCOUNT": forking.SPINS}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert forking.waiting(shared=True) == {}, "the user's own wins"


def test_ctrl_c_while_vllm_is_imported_ends_the_server_without_a_word(monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    (ours, theirs), kept = socket.socketpair(), []
    arguments = json.dumps([["MODEL"], {}, 0])
    monkeypatch.setattr(sys, "argv", ["server", str(theirs.detach()), arguments])
    monkeypatch.setattr(server, "end_group_with", kept.append)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server, "importing", interrupted)
    try:
        assert server.main() == 130
    finally:
        gc.enable()
        ours.close()
        kept[0].close()
    assert capfd.readouterr().err == ""
