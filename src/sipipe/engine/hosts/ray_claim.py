"""A bundle of Ray as an actor; the first one on a node starts the host agent there.

The actor runs in a worker process of Ray's, which imports no vLLM. The agent
(:mod:`sipipe.engine.hosts.ray_agent`) is its child. Ray leaves an actor running whose raylet has
died, so the actor ends itself then; the agent ends with the actor.
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
    """Order to an agent, with all that it needs before it meets the main host."""

    node: int
    """Number of the agent's host; the main host has 0."""
    versions: dict[str, str]
    """Versions on the main host, which are compared before anything of vLLM is unpickled."""
    config: bytes
    """The main host's ``VllmConfig``, pickled by value."""
    devices: list[str]
    """GPUs that Ray gave, as Ray names them."""


class Claim:
    """The actor of one bundle."""

    def __init__(self) -> None:
        # The thread that started this process is the raylet's main one, so it ends with the raylet.
        end_with_parent_thread()

    def devices(self, key: str) -> list[str]:
        """The accelerators of this bundle, as Ray names them. ``key`` is their resource, as ``GPU``."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get(key, []))

    def free(self, first: int, count: int) -> bool:
        """True if nobody on this node listens on any of ``count`` ports from ``first`` on."""
        try:
            for port in range(first, first + count):
                check_port("", port, "")
        except ConfigError:
            return False
        return True

    def start(self, order: Order, environment: dict[str, str], directory: str) -> str:
        """Start the agent. Returns an empty string when only the main host is missing, or else why the
        agent cannot start.

        Args:
            order: what the agent reads first.
            environment: the main host's variables, for those that this node has not set itself. The
                secret is the main host's in any case.
            directory: working directory of the agent, if this node has it.
        """
        # Ray sets OMP_NUM_THREADS to the CPUs that the actor has reserved, which are none.
        variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._agent, self._control = start_child(
            ("-m", "sipipe.engine.hosts.ray_agent"),
            process_group=0,
            cwd=directory if Path(directory).is_dir() else None,
            env={**environment, **variables, SECRET: environment[SECRET]},
        )
        answer = ""
        # An agent that dies before it has read the order resets the connection.
        with suppress(OSError), self._control.makefile("rwb") as agent:
            pickle.dump(order, agent)
            agent.flush()
            # wait: the main host's for the call; the agent's word, or its death, which closes its end
            answer = agent.readline().decode().strip()
        if not answer:
            status = self._agent.wait(GRACE_SECONDS)
            return f"the host agent ended (status {status}); its own log says why"
        return "" if answer == "ready" else answer
