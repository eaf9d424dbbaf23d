"""Plans as the tests ask for them, and what they are made of."""

import dataclasses

from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import STATED, Cluster, device, network
from sipipe.tools.planner.plan import OURS, Choice
from sipipe.tools.planner.search import Search


def config(*, layers, vocabulary, hidden, heads, intermediate, **more):
    """Of a config.json, what a plan needs."""
    found = {"num_hidden_layers": layers, "vocab_size": vocabulary, "hidden_size": hidden}
    return found | {"num_attention_heads": heads, "intermediate_size": intermediate} | more


def make_cluster(
    gpu="h100", hosts=1, per_host=8, cores=96, gigabits=400, adapters=1, assumed=STATED
):
    return Cluster(
        device=device(gpu, assumed=assumed),
        hosts=hosts,
        devices_per_host=per_host,
        network=network(gigabits, adapters, assumed),
        cores_per_host=cores,
    )


def make_plan(facts, cluster, workload, *, costs=None, **options):
    """By data sheets unless ``costs`` are given."""
    costs = costs or datasheet_costs(facts, cluster, workload)
    costs = dataclasses.replace(costs, cluster=cluster)
    return Search(costs=costs, workload=workload, **options).plan()


@dataclasses.dataclass
class Both:
    """SiPipe and the engine that it is compared with, on one (p, t); None: ruled out."""

    ours: Choice | None = None
    stock: Choice | None = None


def by_degree(plan):
    found = {}
    for choice in plan.choices:
        both = found.setdefault((choice.p, choice.t), Both())
        setattr(both, "ours" if choice.engine.key == OURS else "stock", choice)
    return found


@dataclasses.dataclass
class GivenCosts:
    """Costs that a test sets."""

    forwards: list
    sampling: float = 0.0
    scheduling: float = 0.0
    preparing: float = 0.0
    hops: float = 0.0

    def forward(self, stage, work, *, gather):
        return {"compute": self.forwards[stage.index]}

    def preparation(self, engine, stage, work):
        return self.preparing

    def transfer(self, engine, stage, work):
        return 0.0

    def hop(self, stage, work):
        return 0.0 if stage.is_last else self.hops

    def device_sampling(self, work):
        return self.sampling

    def logits_copy(self, stage, work):
        return 0.0

    def host_sampling(self, work, samplers):
        return self.sampling / samplers

    def schedule(self, engine, work):
        return self.scheduling

    def shared_cores(self):
        return 0, 0
