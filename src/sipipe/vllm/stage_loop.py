"""One stage's steady path, iteration by iteration: inputs, hidden states in, forward, out.

The loop owns the stage's ends of the data plane: the link from the previous stage, the link to
the next, and on the last stage the writer of BIC-L.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.channels import LogitsWriter
from sipipe.transfer import LinkEndpoint, open_receiver, open_sender
from sipipe.vllm.processes import WorkerBoot

Report = Callable[[int, dict[str, Any]], None]


class StageLoop:
    """Placeholder text."""
