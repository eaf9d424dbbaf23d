"""``python -m sipipe.engine.hosts.ray_agent FD``: a host agent, as the child of a Ray actor.

FD is its end of a socket pair: the order comes on it, and the agent says on it that only the main host
is missing, or why it cannot be one. It ends with the actor, in good order within a grace time.
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
from sipipe.ipc.parent import end_group_with
from sipipe.messages.start_records import GRACE_SECONDS


def main() -> int:
    """Take the order and be the agent."""
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
    if different := difference(order.versions, versions()):
        raise ConfigError(f"does not fit: {different}")
    load_general_plugins()
    config = config_of(order)
    configure_logging(config.logging_config)
    setup = decide(config, order.node)
    announce(setup)
    return run_agent(setup, ready)


if __name__ == "__main__":
    sys.exit(main())
