"""What is known of a model without being told: a configuration beside its files, what its heads lose, its queries.

Looked for in this order: `diffkv_config.json` in the folder or the repository of the Hub that the model came from;
then, by a digest of the weights, what `hf-diffkv calibrate` left in the user's cache folder; then what ships. The
moments of queries are a file beside each of these.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from . import files
from .sensitivity import Sensitivity

# a folder for measurements; `$XDG_CACHE_HOME/hf_diffkv` or ~/.cache/hf_diffkv without it
FOLDER_VARIABLE = "HF_DIFFKV_CACHE"
SHIPPED = Path(__file__).parent / "measured"

# elements of each parameter that tell a model's weights from another's
SAMPLES = 32

# what would be better, as opposed to what is wrong
HINTS = "hf_diffkv.hints"

_logger = logging.getLogger(HINTS)
_digests: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
_told: set[Any] = set()


def user_folder() -> Path:
    """Where measurements are kept for all that the user runs."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_diffkv"


def keep(measured: Sensitivity) -> Path:
    """Writes measurements to the user's folder, where `measured_of` finds them. Raises `OSError`."""
    folder = user_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{measured.model_digest}.json"
    measured.save(path)
    return path


def measured_of(model: Any) -> Sensitivity | None:
    """What the heads of a model lose, by the digest of its weights; None where nobody measured them.

    Args:
        model: a loaded one; or one without data, on the meta device, whose weights are in a folder of this machine.
    """
    digest = _digest(model)
    if digest is None:
        return None
    path = user_folder() / f"{digest}.json"
    found = path if path.is_file() else _shipped().get(digest)
    return None if found is None else Sensitivity.load(found)


def weights_known(model: Any) -> bool:
    """Whether it can be told which weights a model has or will have."""
    return _digest(model) is not None


def beside(model: Any) -> Path | None:
    """The configuration that is saved with a model's files: a loaded model, its configuration, or a folder's name.

    A repository of the Hub is asked once, for the commit that is in the Hub's cache; no answer counts as none.
    """
    name = _name_of(model)
    if not name:
        return None
    local = Path(name) / files.CONFIG_NAME
    if local.is_file():
        return local
    return None if Path(name).is_dir() else _on_the_hub(os.fspath(name))


def queries_of(model: Any) -> Path | None:
    """The file with the moments of a model's queries (store/query_moments.py), of a loaded model or a configuration.

    That beside the model's configuration comes first, whatever its weights; the others are of these very weights.
    """
    config = beside(model)
    if config is not None:
        near = config.with_name(files.QUERIES_NAME)
        if near.is_file():
            return near
        name = os.fspath(_name_of(model))
        fetched = None if Path(name).is_dir() else _queries_on_the_hub(name, config.parent.name)
        if fetched is not None:
            return fetched
    digest = _digest(model)
    if digest is None:
        return None
    shipped = _shipped().get(digest)
    known = [queries_path(digest)] + ([] if shipped is None else [shipped.with_suffix(".safetensors")])
    return next((path for path in known if path.is_file()), None)


def queries_path(digest: str) -> Path:
    """Where the moments of the queries of a model with these weights are kept for the user."""
    return user_folder() / f"{digest}.safetensors"


def tell_of_calibration(model: Any) -> None:
    """Says once for each model whose weights are known that measuring its heads would save memory."""
    if weights_known(model):
        _tell(
            model,
            "the heads of %s have not been measured, so all of them get the same bits: `hf-diffkv calibrate --model %s "
            "--ratio 0.23` measures them once and saves about a fifth of the cache at no more loss "
            "(docs/calibration.md).",
        )


def tell_of_queries(model: Any) -> None:
    """Says once for each loaded model with measured heads that measuring its queries would lose less."""
    _tell(
        model,
        "the queries of %s have not been measured, so generated keys are rounded to the nearest code: run `hf-diffkv "
        "calibrate --model %s --ratio 0.23` again, which measures them as well (docs/calibration.md).",
    )


def _tell(model: Any, text: str) -> None:
    name = _loaded_from(model)
    if name and (name, text) not in _told:
        _told.add((name, text))
        _logger.warning(text, name, name)


def _digest(model: Any) -> str | None:
    if not hasattr(model, "named_parameters"):
        return None
    if model not in _digests:
        # a rank of several has parts of the weights
        whole = not any(hasattr(parameter, "to_local") for parameter in model.parameters())
        try:
            _digests[model] = model_digest(model) if whole else None
        except ValueError:
            folder = _folder_of(model)
            _digests[model] = None if folder is None else files_digest(model, folder)
    return _digests[model]


def _folder_of(model: Any) -> Path | None:
    """Where the files of a model are on this machine: its folder, or what the Hub's cache has of its repository."""
    name = _loaded_from(model)
    if not name:
        return None
    known = name if Path(name).is_dir() else _known_of_the_hub(name, "config.json")
    return None if known is None else Path(known) if Path(known).is_dir() else Path(known).parent


def _known_of_the_hub(repo: str, file: str) -> str | None:
    """The path of a file that the Hub's cache has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        known = try_to_load_from_cache(repo, file)
    except HFValidationError:
        return None
    return known if isinstance(known, str) else None


@cache
def _shipped() -> dict[str, Path]:
    """What ships, by the digest of the weights."""
    return {json.loads(path.read_text())["model_digest"]: path for path in sorted(SHIPPED.glob("*.json"))}


def _loaded_from(model: Any) -> str:
    """The folder or repository of a loaded model; empty where it has none, or it is only a configuration or a name."""
    return getattr(getattr(model, "config", None), "name_or_path", "")


def _name_of(model: Any) -> str | os.PathLike:
    """What a loaded model or its configuration came from; a name or folder as it is."""
    if isinstance(model, (str, os.PathLike)):
        return model
    return getattr(getattr(model, "config", model), "name_or_path", "")


@cache
def _queries_on_the_hub(repo: str, commit: str) -> Path | None:
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repo, files.QUERIES_NAME, revision=commit))
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, OSError):
        return None


@cache
def _on_the_hub(repo: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    known = _known_of_the_hub(repo, "config.json")
    if known is None:
        return None
    commit = Path(known).parent.name
    try:
        here = try_to_load_from_cache(repo, files.CONFIG_NAME, revision=commit)
        # a string, a mark that it is not there, or None where nobody has asked
        return Path(here) if isinstance(here, str) else None if here else files.find(repo, revision=commit)
    except OSError:
        return None


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
