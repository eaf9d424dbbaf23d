"""The control groups that limit a process: a container's, a pod's, a service's."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(
    kind: str, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """This process's control group and those that it is in, where they limit ``kind``; of version 2
    or 1. Some may have no directory here."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and kind not in controllers.split(","):
            continue
        root = groups / controllers
        for group in (root / path.strip("/"), *(root / path.strip("/")).parents):
            yield group
            if group == root:
                break
