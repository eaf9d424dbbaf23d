"""Every process of an engine, killed at rest and under load: nothing may be left.

Front ends and engines begin with vLLM imported (:mod:`.serve_run`); their code, processes, sockets
and descriptors are those of users. tests/conftest.py has these run after the files that use the
same engines. Agents and heads of several hosts: test_hosts.py.
"""

import contextlib
import gc
import os
import shutil
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.engines import gone, in_shared_memory, in_shared_memory_of, model, prompts
from tests.engine.servers import VLLM, Server, complete, metric, wait_until

from sipipe.ipc.sockets import PREFIX, remove_dead

pytestmark = pytest.mark.engine

LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True, "logprobs": 1}


class Killed(Server):
    """A server whose processes are killed, with a temporary directory of its own."""

    def __init__(self, path, log, module, *options):
        self.temporary = tempfile.mkdtemp(prefix="t")  # short: a socket's path has 107 characters
        self.first = []
        # A user's server forks its engine by itself: nothing has been imported before it starts.
        module, forked = (module, True) if module != USERS else ("sipipe", False)
        if module != "sipipe":
            options += ("--distributed-executor-backend", "sipipe.Executor")
        options += ("--enforce-eager", "--max-model-len", "2048", "--dtype", "float32")
        super().__init__(
            path, log, *options, temporary=self.temporary, module=module, forked=forked
        )
        self.first = super().everybody()

    def everybody(self):
        """Also those whose parent has died."""
        return list(dict.fromkeys([*self.first, *super().everybody()]))

    def find(self, who):
        """The front end is vLLM's API server."""
        if who == "supervisor":
            return self.first[0]
        return super().find("EngineCore").parent() if who == "front end" else super().find(who)

    def replace_sampler(self):
        """Kill a sampler, and wait until another has taken its place."""
        killed = self.find("sipipe.sampler")
        killed.kill()
        wait_until(lambda: metric(self.address, "sipipe_restarts_total") == 1)
        assert gone([killed])
        self.first = [one for one in self.everybody() if one != killed]

    def close(self):
        super().close()
        shutil.rmtree(self.temporary, ignore_errors=True)


USERS = "sipipe, of a user"
DRAINS = ("--shutdown-timeout", "600")
"""A shutdown that waits for requests, of which nobody is left to take the answers."""
ENGINES = ("front end", "EngineCore", "Worker_PP1")
SERVED = [(USERS, who, True) for who in ("supervisor", *ENGINES)]
SERVED += [("sipipe", who, False) for who in ("supervisor", *ENGINES)]
SERVED += [(VLLM, who, busy) for who in ENGINES for busy in (False, True)]
FEW = pytest.param("sipipe", "supervisor", True, marks=pytest.mark.ci)


# Of a server that dies before it answers, http.client leaves the file of the socket open.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    ("module", "who", "busy"),
    [FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in SERVED)],
)
def test_a_killed_server_leaves_nothing(models, tmp_path, monkeypatch, module, who, busy):
    server = Killed(model(models), tmp_path / "log", module, *(DRAINS if busy else ()))
    with contextlib.ExitStack() as closing:
        closing.callback(server.close)
        pool = closing.enter_context(ThreadPoolExecutor(4))
        asked = prompts(4, longest=20, seed=3) if busy else []
        answers = [pool.submit(complete, server.address, prompt, LONG) for prompt in asked]
        wait_until(lambda: metric(server.address, "vllm:num_requests_running") == len(asked))
        server.replace_sampler()
        names = in_shared_memory_of(server.everybody())  # perhaps none
        began = time.monotonic()
        server.find(who).kill()
        assert gone(server.everybody()), server.log.read_text()[-3000:]
        print(f"{module}, {who}, {busy}: nothing left after {time.monotonic() - began:.1f} s")
        assert [answer.exception() is not None for answer in answers] == [True] * len(asked)
        answers.clear()
        gc.collect()
        with socket.socket() as again:  # its port is free
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))
        wait_until(lambda: not names & in_shared_memory(), 5)
        # What a killed supervisor leaves has a lock that nobody holds, and the next start takes it.
        monkeypatch.setattr(tempfile, "tempdir", server.temporary)
        left = {name for name in os.listdir(server.temporary) if not name.startswith("torch")}
        assert all(name.startswith(PREFIX) and who == "supervisor" for name in left)
        remove_dead()
        assert not list(Path(server.temporary).glob(f"{PREFIX}*"))
