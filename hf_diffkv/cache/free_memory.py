"""Free memory of a device; `max_bytes` may be a share of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

# where Linux keeps control groups, which limit containers and services, and where it says which one a process is in
CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# folder and files of a group's memory in versions 2 and 1: its limit, its usage, and the cached files within that
GROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def budget_of(max_bytes: int | str, device: torch.device) -> int:
    """Returns `max_bytes` in bytes; a share such as "80%" refers to the memory now free on `device`.

    Raises:
        ValueError: `max_bytes` is a share, and the free memory is unknown.
    """
    return max_bytes if isinstance(max_bytes, int) else int(free_bytes(device) * float(max_bytes.rstrip("%")) / 100)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes still available on `device`, including those that PyTorch holds for later tensors.

    Raises:
        ValueError: the free memory is unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        return min([psutil.virtual_memory().available, *_left_in_groups()])
    raise ValueError(f"the amount of free memory on {device} is unknown; give max_bytes as a size such as '3GB'.")


def _left_in_groups() -> list[int]:
    """Returns the bytes that container and service limits leave to this process; the machine may have more."""
    left = []
    for place, limit, used, cached in GROUP_FILES:
        root = CONTROL_GROUPS / place
        for group in _own_groups(root, place):
            try:
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                most, now = ((group / name).read_text().strip() for name in (limit, used))
                # cached files make room when memory is short
                left.append(max(0, int(most) - int(now) + int(stat.get(cached, 0))))
            except (OSError, ValueError):
                pass  # no such group, or "max": no limit
    return left


def _own_groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's group and of the groups that contain it.

    Args:
        controller: name of the controller in version 1, empty in version 2.
    """
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return []
    own = [root / path.lstrip("/") for _, names, path in lines if controller in names.split(",")]
    # within a container, the path may be the one seen from outside, and the group the root
    return [each for group in own for each in (group, *group.parents) if each.is_relative_to(root)]
