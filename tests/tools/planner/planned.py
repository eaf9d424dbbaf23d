"""Plans as the tests ask for them."""

import dataclasses

from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.plan import OURS, Choice
from sipipe.tools.planner.search import Search


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

    @property
    def gain(self):
        return self.ours.throughput / self.stock.throughput


def by_degree(plan):
    found = {}
    for choice in plan.choices:
        both = found.setdefault((choice.p, choice.t), Both())
        setattr(both, "ours" if choice.engine.key == OURS else "stock", choice)
    return found
