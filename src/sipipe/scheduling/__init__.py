"""Which requests enter which microbatch: a pure policy, and a simulator to judge it by."""

from sipipe.scheduling.policy import Move, Plan, Sequence, SlotPolicy, SlotStatistics
from sipipe.scheduling.settings import SlotSettings

__all__ = ["Move", "Plan", "Sequence", "SlotPolicy", "SlotSettings", "SlotStatistics"]
