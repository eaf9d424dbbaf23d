"""``python -m sipipe.engine.hosts.ray_agent FD``: a host agent, as the child of a Ray actor.

FD is the agent's end of a socket pair. The actor sends the order on it. The agent answers with one
line: that only the main host is missing, or why it cannot start. It ends with the actor, in good
order within ``GRACE_SECONDS``.
"""

import os
import pickle
import socket
import sys
from collections.abc import Callable

from vllm.logger import configure_logging
from vllm.plugins import load_general_plugins

from sipipe.engine.hosts.agent import run_agent
from sipipe.engine.hosts.ray_claim import Order
from sipipe.engine.hosts.ray_placement import config_of
from sipipe.engine.setup.decide import decide
from sipipe.engine.setup.host_agreement import difference, versions
from sipipe.engine.start.launch import announce
from sipipe.errors import ConfigError, SiPipeError, tell
from sipipe.ipc.lost_exit import ask_again_for_lost_exits
from sipipe.ipc.parent import end_group_with
from sipipe.messages.start_records import GRACE_SECONDS


def main() -> int:
    """Read the order, and be the agent until the engine ends; returns the exit status."""
    ask_again_for_lost_exits()
    claim = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(claim.fileno(), False)
    with claim.makefile("rb") as actor:
        # wait: none; the actor, whose death closes its end
        order: Order = pickle.load(actor)  # from our parent, through a socket of its own
    end_group_with(claim, GRACE_SECONDS)
    try:
        # wait: none: a line; the actor, whose death closes its end
        return _run(order, lambda: claim.sendall(b"ready\n"))
    except SiPipeError as error:
        tell(error)
        # wait: none: a line; the actor, whose death closes its end
        claim.sendall(f"{error}\n".encode())
        return 1


def _run(order: Order, ready: Callable[[], object]) -> int:
    # Before anything of vLLM is unpickled, whose classes differ between versions.
    different = difference(order.versions, versions())
    if different:
        raise ConfigError(f"does not fit: {different}")
    load_general_plugins()
    config = config_of(order)
    configure_logging(config.logging_config)
    setup = decide(config, order.node)
    announce(setup)
    return run_agent(setup, ready)


if __name__ == "__main__":
    sys.exit(main())
