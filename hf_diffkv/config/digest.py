"""What tells a model's weights from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
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
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(f"{name} has no data here (it is on the meta device); load the model without offloading.")
    return _digest_of(parameter for _, parameter in parameters)


def files_digest(model: Any, folder: Path) -> str | None:
    """The digest that a model will have once its weights are loaded from safetensors files; of them little is read.

    Args:
        model: may be on the meta device.
        folder: has the files.

    Returns:
        None where the files do not have all parameters under their names and in their shapes.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        places = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = opened.enter_context(safe_open(path, framework="pt"))
                places.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError):
            return None
        parameters = list(model.named_parameters())
        if not all(
            name in places and places[name].get_slice(name).get_shape() == list(parameter.shape)
            for name, parameter in parameters
        ):
            return None
        return _digest_of(places[name].get_tensor(name) for name, _ in parameters)


def _digest_of(parameters: Iterable[Any]) -> str:
    # configurations know no tensors otherwise, and importing them must not load PyTorch
    import torch

    digest = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        places = [index * (flat.numel() - 1) // max(1, count - 1) for index in range(count)]
        samples = flat[torch.tensor(places, device=flat.device, dtype=torch.int64)].float().cpu()
        digest.update(",".join(map(str, parameter.shape)).encode())
        digest.update(samples.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]
