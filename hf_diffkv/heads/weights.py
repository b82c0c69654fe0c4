"""Weights that identify a model: of a loaded one, or in safetensors files, of which little is read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# elements of each parameter that tell a model's weights from another's
SAMPLES = 32

INDEX_NAME, FILE_NAME = "model.safetensors.index.json", "model.safetensors"
# modules of PEFT, torch.compile, FSDP and activation checkpointing around a model's own
_WRAPPERS = {"_orig_mod", "base_layer", "original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# PEFT's trained copies of a module
_COPIES = "modules_to_save"
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
# parts of a model that are no decoder of text
_OTHER_PARTS = re.compile(r"vision|visual|audio|image|speech|video|projector|^mtp")


def norm_name(parameter: str) -> str | None:
    """The name of a normalisation weight within the decoder: "layers.3.input_layernorm", "norm".

    It is the same for a model, for one that PEFT or `torch.compile` wraps, and in files.

    Returns:
        None for any other parameter, and for those of vision and audio towers.
    """
    *modules, last = [part for part in parameter.split(".") if part not in _WRAPPERS]
    if last != "weight" or not modules or _COPIES in modules or not _NORM.search(modules[-1].lower()):
        return None
    if any(_OTHER_PARTS.search(part) for part in modules):
        return None
    layer = next((index for index, part in enumerate(modules) if part.isdecimal()), None)
    return modules[-1] if layer is None else ".".join(modules[max(0, layer - 1) :])


def norms_of(model: Any) -> dict[str, Any]:
    """The normalisation weights of a model by `norm_name`; the first of those that share a name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        short = norm_name(name)
        if short is not None:
            found.setdefault(short, parameter)
    return found


def norms_in_files(model: Any, folder: Path) -> dict[str, Any] | None:
    """The weights that `norms_of` a model will be once they are loaded from the safetensors files of a folder.

    Args:
        model: may be on the meta device.

    Returns:
        None where the files do not have all of them in their shapes.
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
    """The digest that a model will have once its weights are loaded from safetensors files.

    Args:
        model: may be on the meta device.

    Returns:
        None where the files do not have all parameters under their names and in their shapes.
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
    """`count` elements of a tensor, evenly spaced from the first to the last, float32 [count]."""
    # configurations know no tensors otherwise, and importing them must not load PyTorch
    import torch

    flat = weight.detach().reshape(-1)
    places = [index * (flat.numel() - 1) // max(1, count - 1) for index in range(count)]
    return flat[torch.tensor(places, device=flat.device, dtype=torch.int64)].float().cpu()


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any] | None]:
    """The open file of each tensor in a folder, by its name; None where a file cannot be read."""
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
    """The files that `from_pretrained` reads; all of a folder that has other names."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (AttributeError, KeyError, ValueError) as error:
            raise OSError(f"{index} is no index") from error
    whole = folder / FILE_NAME
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _digest_of(parameters: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(",".join(map(str, parameter.shape)).encode())
        digest.update(samples_of(parameter, min(SAMPLES, parameter.numel())).numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]
