"""Plans as the tests ask for them."""

import dataclasses

from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.plan import Search


def make_plan(facts, cluster, workload, *, costs=None, **options):
    """By data sheets unless ``costs`` are given."""
    costs = costs or datasheet_costs(facts, cluster, workload)
    costs = dataclasses.replace(costs, cluster=cluster)
    return Search(costs=costs, workload=workload, **options).plan()
