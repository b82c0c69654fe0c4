"""Weights that identify a model, from a loaded model or from a few elements of safetensors files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# number of elements of each parameter that go into a digest
SAMPLES = 32

INDEX_NAME, FILE_NAME = "model.safetensors.index.json", "model.safetensors"
# modules in which PEFT, torch.compile, FSDP and activation checkpointing wrap a model's own
_WRAPPERS = {"_orig_mod", "base_layer", "original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# PEFT's trained copies of a module
_COPIES = "modules_to_save"
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
# parts of a model outside the text decoder
_OTHER_PARTS = re.compile(r"vision|visual|audio|image|speech|video|projector|^mtp")


def norm_name(parameter: str) -> str | None:
    """Returns the name of a normalisation weight within the decoder, such as "layers.3.input_layernorm" or "norm".

    The name is the same for a plain model, for one wrapped by PEFT or `torch.compile`, and in files.

    Returns:
        The name; None for other parameters, and for those of vision and audio towers.
    """
    *modules, last = [part for part in parameter.split(".") if part not in _WRAPPERS]
    if last != "weight" or not modules or _COPIES in modules or not _NORM.search(modules[-1].lower()):
        return None
    if any(_OTHER_PARTS.search(part) for part in modules):
        return None
    layer = next((index for index, part in enumerate(modules) if part.isdecimal()), None)
    return modules[-1] if layer is None else ".".join(modules[max(0, layer - 1) :])


def norms_of(model: Any) -> dict[str, Any]:
    """Returns the normalisation weights of a model by `norm_name`; the first one if several share a name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        short = norm_name(name)
        if short is not None:
            found.setdefault(short, parameter)
    return found


def norms_in_files(model: Any, folder: Path) -> dict[str, Any] | None:
    """Reads the weights that `norms_of` would return for the loaded model from a folder's safetensors files.

    Args:
        model: model, which may be on the meta device.

    Returns:
        Weights by name; None if the files lack some or have them in other shapes.
    """
    own = {name for name, _ in model.named_parameters()}
    with _opened(folder) as places:
        named: dict[str, str] = {}
        # the model's own names come first
        for key in sorted(places or (), key=lambda key: key not in own):
            short = norm_name(key)
            if short is not None:
                named.setdefault(short, key)
        wanted = norms_of(model)
        if places is None or not all(
            name in named and places[named[name]].get_slice(named[name]).get_shape() == list(weight.shape)
            for name, weight in wanted.items()
        ):
            return None
        return {name: places[named[name]].get_tensor(named[name]) for name in wanted}


def model_digest(model: Any) -> str:
    """Returns a digest of the shapes of all parameters and of some elements, 16 hexadecimal digits.

    It is SHA-256 over all parameters in the model's order, tied ones once: the shape as decimal numbers, then `SAMPLES`
    elements, evenly spaced from the first to the last, as little-endian float32. A model stored in bfloat16 therefore
    has the same digest when it is loaded in float32.

    Raises:
        ValueError: a parameter has no data, for example on the meta device.
    """
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(f"{name} has no data here (it is on the meta device); load the model without offloading.")
    return _digest_of(parameter for _, parameter in parameters)


def files_digest(model: Any, folder: Path) -> str | None:
    """Computes the digest that a model will have once its weights are loaded from safetensors files.

    Args:
        model: model, which may be on the meta device.

    Returns:
        The digest; None if the files do not have all parameters with their names and shapes.
    """
    parameters = list(model.named_parameters())
    with _opened(folder) as places:
        if places is None or not all(
            name in places and places[name].get_slice(name).get_shape() == list(parameter.shape)
            for name, parameter in parameters
        ):
            return None
        return _digest_of(places[name].get_tensor(name) for name, _ in parameters)


def samples_of(weight: Any, count: int) -> Any:
    """Returns `count` elements of a tensor, evenly spaced from the first to the last, float32 [count]."""
    # imported here, as importing configurations must not load PyTorch
    import torch

    flat = weight.detach().reshape(-1)
    places = [index * (flat.numel() - 1) // max(1, count - 1) for index in range(count)]
    return flat[torch.tensor(places, device=flat.device, dtype=torch.int64)].float().cpu()


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Opens a folder's files and yields the open file of each tensor by name; None if a file cannot be read."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        places: dict[str, Any] = {}
        try:
            for path in _weight_files(folder):
                file = opened.enter_context(safe_open(path, framework="pt"))
                places.update(dict.fromkeys(file.keys(), file))
            readable = True
        except (OSError, SafetensorError):
            readable = False
        yield places if readable else None


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files that `from_pretrained` reads, or all safetensors files if they have other names."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (AttributeError, KeyError, ValueError) as error:
            raise OSError(f"{index} is not an index") from error
    whole = folder / FILE_NAME
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _digest_of(parameters: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(",".join(map(str, parameter.shape)).encode())
        digest.update(samples_of(parameter, min(SAMPLES, parameter.numel())).numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]
