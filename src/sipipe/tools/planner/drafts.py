"""Worth of a draft head on the last stage: the tokens that it adds, beside the time that it takes.

A head of one layer makes k drafts of each sequence in each iteration, a pass of its own for each draft,
and the sequence has 1 + k rows in the next iteration. A slot's next turn waits for the samplers and for
the head, so both are on the round trip (docs/planner.md, section 9).
"""

import dataclasses
import math

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.cut import Drafting, cut_layers
from sipipe.tools.planner.costs import DatasheetCosts
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import Placement, place
from sipipe.tools.planner.plan import Choice, DraftWorth
from sipipe.tools.planner.workload import Workload


def worth_of_drafts(
    costs: DatasheetCosts, workload: Workload, choice: Choice, samplers: int
) -> DraftWorth | None:
    """The worth of the best number of drafts from 1 to ``workload.drafts``, with the degrees of
    ``choice``, and its sequences or as many as fit beside the head.

    None where not even one draft fits into the tokens of a microbatch, or the head into the memory.

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
        layers = _layers(costs, workload, choice, drafts)
        placement = place(
            costs.facts.layers,
            choice.p,
            choice.t,
            costs.cluster.devices_per_host,
            layers,
            head_layers=1,
        )
        batch = _sequences(costs, workload, choice, placement)
        work = drafting.microbatch(math.ceil(batch / rounds))
        if not batch or work.tokens > workload.max_num_batched_tokens:
            break
        iteration = iterate(
            costs, choice.engine, placement, work, inflight=rounds, samplers=samplers
        )
        tokens = drafting.tokens_a_pass
        throughput = batch * tokens / iteration.delay
        worths.append(
            DraftWorth(
                drafts=drafts,
                batch=batch,
                acceptance=workload.acceptance,
                tokens_a_pass=tokens,
                layers=layers,
                longer=iteration.delay / choice.iteration.delay,
                throughput=throughput,
                tpot=iteration.delay / tokens,
                gain=throughput / choice.throughput,
            )
        )
    return max(worths, key=lambda worth: worth.throughput, default=None)


def _sequences(
    costs: DatasheetCosts, workload: Workload, choice: Choice, placement: Placement
) -> int:
    """Sequences of ``choice`` that still run at once beside the head's weights and KV cache; 0 where
    not all that were asked for fit."""
    tokens = costs.memory(placement, workload.memory_utilization).kv_tokens
    if tokens < max(workload.longest, workload.min_kv_tokens):
        return 0
    batch = min(choice.batch, max(1, int(tokens // workload.context)))
    return 0 if batch < (workload.fixed_batch or 1) else batch


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
        drafting=Drafting(drafts=drafts),
    )
