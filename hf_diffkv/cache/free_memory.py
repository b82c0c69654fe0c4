"""Free memory of a device, of which `max_bytes` may be a share."""

from __future__ import annotations

import psutil
import torch


def budget_of(max_bytes: int | str, device: torch.device) -> int:
    """Returns `max_bytes` in bytes; a share such as "80%" is taken of the memory that is free on `device` now.

    Raises:
        ValueError: `max_bytes` is a share, and how much memory is free is not known.
    """
    return max_bytes if isinstance(max_bytes, int) else int(free_bytes(device) * float(max_bytes.rstrip("%")) / 100)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that may still be taken on `device`, those that PyTorch holds for later tensors included.

    Raises:
        ValueError: nobody knows.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        return psutil.virtual_memory().available
    raise ValueError(f"how much memory is free on {device} is not known; give max_bytes as a size such as '3GB'.")
