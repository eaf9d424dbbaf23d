"""Which requests enter which microbatch: a pure policy, and a simulator to judge it by."""

from sipipe.scheduling.pace import Pace
from sipipe.scheduling.policy import Move, Plan, Sequence, SlotPolicy, SlotStatistics
from sipipe.scheduling.settings import SlotSettings

__all__ = ["Move", "Pace", "Plan", "Sequence", "SlotPolicy", "SlotSettings", "SlotStatistics"]
