"""What tells a model's weights from another's."""

from __future__ import annotations

import hashlib
from typing import Any

# elements of each parameter that count
SAMPLES = 32


def model_digest(model: Any) -> str:
    """16 hexadecimal digits: of the shapes of all parameters and of some of their elements.

    SHA-256 over each parameter in the model's order, tied ones once: its shape as decimal numbers, then `SAMPLES`
    elements, evenly spaced from the first to the last, as little-endian float32. So a model in bfloat16 has the digest
    that it has when it is loaded in float32.

    Raises:
        ValueError: parameters without data, on the meta device for example.
    """
    # configurations know no tensors otherwise, and importing them must not load PyTorch
    import torch

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data here (it is on the meta device); load the model without offloading.")
        flat = parameter.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        places = [index * (flat.numel() - 1) // max(1, count - 1) for index in range(count)]
        samples = flat[torch.tensor(places, device=flat.device, dtype=torch.int64)].float().cpu()
        digest.update(",".join(map(str, parameter.shape)).encode())
        digest.update(samples.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]
