"""A bundle of Ray as an actor; the first one on a node starts the host agent there.

Runs in a worker process of Ray's, which imports no vLLM; the agent (:mod:`sipipe.engine.hosts.ray_agent`)
is its child. The actor ends with its raylet, which Ray does not see to, and the agent with the actor.
"""

import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sipipe.errors import ConfigError
from sipipe.ipc.child import start_child
from sipipe.ipc.parent import end_with_parent_thread
from sipipe.ipc.secret import SECRET
from sipipe.ipc.tcp import check_port
from sipipe.messages.start_records import GRACE_SECONDS


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an agent is to be, before it meets the main host."""

    node: int
    versions: dict[str, str]
    """The main host's; compared before anything of vLLM is unpickled."""
    config: bytes
    devices: list[str]
    """The GPUs that Ray gave, as it names them."""


class Claim:
    """The actor of one bundle."""

    def __init__(self) -> None:
        # Ray leaves an actor running whose raylet has died. The raylet forks in its main thread.
        end_with_parent_thread()

    def devices(self, key: str) -> list[str]:
        """The accelerators of this bundle."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get(key, []))

    def free(self, first: int, count: int) -> bool:
        """Whether nobody here listens on ``count`` ports from ``first`` on."""
        try:
            for port in range(first, first + count):
                check_port("", port, "")
        except ConfigError:
            return False
        return True

    def start(self, order: Order, environment: dict[str, str], directory: str) -> str:
        """Start the agent; returns when it is about to meet the main host, or why it cannot.
        ``environment``: what the node has not set itself; the secret in any case."""
        # Ray sets OMP_NUM_THREADS, to what the actor has reserved: nothing.
        own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._agent, self._ours = start_child(
            ("-m", "sipipe.engine.hosts.ray_agent"),
            process_group=0,
            cwd=directory if Path(directory).is_dir() else None,
            env={**environment, **own, SECRET: environment[SECRET]},
        )
        said = ""
        # An agent that dies with the order unread makes a reset of its end.
        with suppress(OSError), self._ours.makefile("rwb") as agent:
            pickle.dump(order, agent)
            agent.flush()
            # wait: the main host's for the call; the agent's word, or its death, which closes its end
            said = agent.readline().decode().strip()
        if not said:
            status = self._agent.wait(GRACE_SECONDS)
            return f"the host agent ended (status {status}); its own log says why"
        return "" if said == "ready" else said
