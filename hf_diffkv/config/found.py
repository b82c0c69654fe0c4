"""What is known of a model without being told: a configuration beside its files, what its heads lose, its queries.

Looked for in this order: `diffkv_config.json` in the folder or the repository of the Hub that the model came from;
then what `hf-diffkv calibrate` left in the user's cache folder, and what ships, for these very weights; then for a
model with the same mark, or nearly the same (`heads/mark.py`). The moments of queries are a file beside each of these.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from ..heads.mark import SAME
from ..heads.recognition import identity_of, known_of_the_hub, loaded_from, marks_in, nearest
from . import files
from .sensitivity import Sensitivity

# a folder for measurements; `$XDG_CACHE_HOME/hf_diffkv` or ~/.cache/hf_diffkv without it
FOLDER_VARIABLE = "HF_DIFFKV_CACHE"
SHIPPED = Path(__file__).parent / "measured"
# files of what heads lose, and of the moments of queries
TABLE, MOMENTS = ".json", ".safetensors"

# what would be better, as opposed to what is wrong
HINTS = "hf_diffkv.hints"

_logger = logging.getLogger(HINTS)
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
    path = folder / f"{measured.model_digest}{TABLE}"
    measured.save(path)
    return path


def measured_of(model: Any) -> Sensitivity | None:
    """What the heads of a model, or of its nearest relative, lose; None where nobody measured them.

    A relative is named in the log, once.

    Args:
        model: a loaded one; or one without data, on the meta device, whose weights are in a folder of this machine.
    """
    found = _lookup(model, TABLE)
    return None if found is None else Sensitivity.load(found)


def weights_known(model: Any) -> bool:
    """Whether it can be told which weights a model has or will have."""
    identity = identity_of(model)
    return identity.digest is not None or identity.mark is not None


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

    The file beside the model's configuration comes first, whatever the weights; then the one for these very weights;
    then those of the model, or its relative, whose measurements `measured_of` takes.
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
    own = _by_digest(model, MOMENTS)
    if own is not None:
        return own
    table = _lookup(model, TABLE)
    same = None if table is None else table.with_suffix(MOMENTS)
    return same if same is not None and same.is_file() else _lookup(model, MOMENTS)


def queries_path(digest: str) -> Path:
    """Where the moments of the queries of a model with these weights are kept for the user."""
    return user_folder() / f"{digest}{MOMENTS}"


def tell_of_calibration(model: Any) -> None:
    """Says once for each model whose weights are known that measuring its heads would save memory."""
    if weights_known(model):
        _tell(
            model,
            "the heads of %s have not been measured, so all of them get the same bits: `hf-diffkv calibrate --model "
            "%s` measures them once and saves about a fifth of the cache at no more loss (docs/calibration.md).",
        )


def tell_of_queries(model: Any) -> None:
    """Says once for each loaded model with measured heads that measuring its queries would lose less."""
    _tell(
        model,
        "the queries of %s have not been measured, so generated keys are rounded to the nearest code: run `hf-diffkv "
        "calibrate --model %s` again, which measures them as well (docs/calibration.md).",
    )


def _tell(model: Any, text: str) -> None:
    name = loaded_from(model)
    if name and (name, text) not in _told:
        _told.add((name, text))
        _logger.warning(text, name, shlex.quote(name))


def _tell_of_relative(model: Any, path: Path) -> None:
    name = loaded_from(model) or "this model"
    if (name, path) not in _told:
        _told.add((name, path))
        _logger.warning(
            "the heads of %s have not been measured, but its normalisation weights are nearly those of a measured "
            "model, so that one's measurements are used: %s (docs/calibration.md).",
            *(name, path),
        )


def _lookup(model: Any, suffix: str) -> Path | None:
    """The file of measurements for a model or its nearest relative."""
    found = _by_digest(model, suffix)
    mark = identity_of(model).mark
    if found is not None or mark is None:
        return found
    best = nearest(mark, [*marks_in(user_folder(), suffix), *marks_in(SHIPPED, suffix)])
    if best is None:
        return None
    path, distance = best
    if distance > SAME:
        _tell_of_relative(model, path)
    return path


def _by_digest(model: Any, suffix: str) -> Path | None:
    """The file of measurements for these very weights."""
    digest = identity_of(model).digest
    if digest is None:
        return None
    shipped = _shipped().get(digest)
    known = [user_folder() / f"{digest}{suffix}", *([] if shipped is None else [shipped.with_suffix(suffix)])]
    return next((path for path in known if path.is_file()), None)


@cache
def _shipped() -> dict[str, Path]:
    """What ships, by the digest of the weights."""
    return {json.loads(path.read_text())["model_digest"]: path for path in sorted(SHIPPED.glob(f"*{TABLE}"))}


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

    known = known_of_the_hub(repo, "config.json")
    if known is None:
        return None
    commit = Path(known).parent.name
    try:
        here = try_to_load_from_cache(repo, files.CONFIG_NAME, revision=commit)
        # a string, a mark that it is not there, or None where nobody has asked
        return Path(here) if isinstance(here, str) else None if here else files.find(repo, revision=commit)
    except OSError:
        return None
