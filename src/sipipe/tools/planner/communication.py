"""Time and volume of what travels between devices (docs/planner.md, sections 5 and 8)."""

import math

from sipipe.tools.planner.hardware import Cluster
from sipipe.tools.planner.placement import Stage

_MICRO = 1e-6


def all_reduce_seconds(cluster: Cluster, stage: Stage, size: float) -> float:
    """One all-reduce of ``size`` bytes among the ranks of a stage; 0 for one rank. All rings share a
    host's adapters, which so carry the volume that a single device of the ring carries."""
    ranks, hosts, link, network = stage.t, stage.hosts, cluster.device.link, cluster.network
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    inside = link.step_us * _MICRO * math.log2(max(1.0, ranks / hosts))
    in_link = moved / link.bytes_per_second
    if hosts == 1:
        small = (
            link.small_us * _MICRO + moved / (link.small_gbs * 1e9) if link.small_us else math.inf
        )
        return min(inside + in_link, small)
    rings = (network.step_us, network.efficiency), (network.small_step_us, network.small_efficiency)
    return inside + min(
        step_us * _MICRO * math.log2(hosts)
        + max(in_link, moved / (network.peak_bytes_per_second * efficiency))
        for step_us, efficiency in rings
    )


def hop_seconds(cluster: Cluster, stage: Stage, size: float) -> float:
    """``size`` bytes of hidden states from ``stage`` to the next one: each rank sends its 1/t share;
    that the receivers gather the rest on their own link, at least as fast, is left out."""
    if stage.is_last:
        return 0.0
    if stage.crosses:
        network = cluster.network
        rate = network.peak_bytes_per_second * network.efficiency
        return network.hop_us * _MICRO + size / rate
    link = cluster.device.link
    return link.hop_us * _MICRO + size / stage.t / link.bytes_per_second


def volume_per_device(layers: int, hidden: int, tokens: float, p: int, t: int) -> float:
    """Elements that one device sends while ``tokens`` tokens pass the pipeline, on average: two
    all-reduces a layer move ``2 (t - 1) / t`` of their message each."""
    return tokens * hidden * (4 * layers * (t - 1) / (p * t) + (p - 1) / p)
