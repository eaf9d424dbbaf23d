"""Planning a deployment: which pipeline and tensor degree, for this model, cluster and latency.

The performance model of the paper's introduction, background and appendix, derived again in
docs/planner.md, extended by what the paper is about: sampling, preparation, hand-over, memory.

>>> from sipipe.planner import Cluster, Workload, device, load_model, make_plan, network
>>> cluster = Cluster(
...     device=device("h100"), hosts=2, devices_per_host=8, network=network(400), cores_per_host=96
... )
>>> plan = make_plan(load_model("llama-3.1-405b"), cluster, Workload(input=1000, output=300))
>>> (plan.best.p, plan.best.t)
(4, 4)
"""

from sipipe.planner.costs import Costs, DatasheetCosts
from sipipe.planner.hardware import (
    Cluster,
    Device,
    device,
    devices,
    engines,
    local_cpu,
    network,
    samplings,
)
from sipipe.planner.hf_config import builtin_models, facts_from_config, load_model
from sipipe.planner.models import ModelFacts
from sipipe.planner.plan import Choice, Plan, Prediction, Rejected, make_plan
from sipipe.planner.workload import Workload

__all__ = [
    "Choice",
    "Cluster",
    "Costs",
    "DatasheetCosts",
    "Device",
    "ModelFacts",
    "Plan",
    "Prediction",
    "Rejected",
    "Workload",
    "builtin_models",
    "device",
    "devices",
    "engines",
    "facts_from_config",
    "load_model",
    "local_cpu",
    "make_plan",
    "network",
    "samplings",
]
