"""Costs that a test sets, for the tests of the loop."""

import dataclasses

import pytest


@dataclasses.dataclass
class GivenCosts:
    """Costs that a test sets."""

    forwards: list
    sampling: float = 0.0
    scheduling: float = 0.0
    preparing: float = 0.0
    hops: float = 0.0
    copying: float = 0.0

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
        return self.copying

    def host_sampling(self, work, samplers):
        return self.sampling / samplers

    def schedule(self, engine, work):
        return self.scheduling

    def shared_cores(self):
        return 0, 0


@pytest.fixture(scope="session")
def given_costs():
    """The class: ``given_costs(forwards, sampling, scheduling, preparing, hops)``."""
    return GivenCosts
