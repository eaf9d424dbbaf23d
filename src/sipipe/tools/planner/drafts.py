"""Worth of a draft head on the last stage: the tokens that it adds, beside the time that it takes.

A head of one layer makes k drafts of each sequence in each iteration, a pass of its own for each draft,
and the sequence has 1 + k rows in the next iteration. A slot's next turn waits for the samplers and for
the head, so both are on the round trip (docs/planner.md, section 9).
"""

import dataclasses
import math

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.cut import cut_layers
from sipipe.tools.planner.costs import DatasheetCosts
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.plan import Choice, DraftWorth
from sipipe.tools.planner.workload import Workload


def worth_of_drafts(
    costs: DatasheetCosts, workload: Workload, choice: Choice, samplers: int
) -> DraftWorth | None:
    """The worth of the best number of drafts from 1 to ``workload.drafts``, with the degrees and the
    sequences of ``choice``; None where not even one draft fits into the tokens of a microbatch.

    Args:
        costs: the model's costs on the cluster.
        workload: what ``choice`` serves, with the most drafts and how likely each is right.
        choice: a deployment of SiPipe's, without drafts.
        samplers: CPU sampler processes, 1 or more.
    """
    rounds = min(choice.inflight, choice.batch)
    worths = []
    for drafts in range(1, workload.drafts + 1):
        drafting = dataclasses.replace(workload, drafts=drafts)
        work = drafting.microbatch(math.ceil(choice.batch / rounds))
        if work.tokens > workload.max_num_batched_tokens:
            break
        layers = _layers(costs, workload, choice, drafts)
        placement = place(
            costs.facts.layers, choice.p, choice.t, costs.cluster.devices_per_host, layers
        )
        iteration = iterate(
            costs, choice.engine, placement, work, inflight=rounds, samplers=samplers
        )
        tokens = drafting.tokens_a_pass
        worths.append(
            DraftWorth(
                drafts=drafts,
                acceptance=workload.acceptance,
                tokens_a_pass=tokens,
                layers=layers,
                longer=iteration.delay / choice.iteration.delay,
                throughput=choice.batch * tokens / iteration.delay,
                tpot=iteration.delay / tokens,
            )
        )
    return max(worths, key=lambda worth: worth.throughput, default=None)


def _layers(
    costs: DatasheetCosts, workload: Workload, choice: Choice, drafts: int
) -> tuple[int, ...]:
    """Layers of each stage, as the engine cuts them where a head is on the last one."""
    device = costs.cluster.device
    usable = device.memory_bytes * workload.memory_utilization
    return cut_layers(
        costs.facts,
        choice.p,
        choice.t,
        device=device.kind,
        kv_loss=SiPipeConfig().kv_loss,
        memory=math.inf if device.kind == "cpu" else usable,
        drafts=drafts,
    )
