"""Looks up what is known about a model: a configuration saved with its files, its head losses, its query moments.

The order is: `diffkv_config.json` in the folder or Hub repository that the model was loaded from; measurements of
exactly these weights, from `hf-diffkv calibrate` in the user's cache folder or shipped; measurements of a model with
the same or nearly the same mark (`heads/mark.py`). Query moments are in a file next to each of these.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from . import hub
from .mark import SAME
from .recognition import Identity, identity_of, loaded_from, marks_in, nearest
from .sensitivity import Sensitivity

# sets the folder of measurements; the default is `$XDG_CACHE_HOME/hf_diffkv` or ~/.cache/hf_diffkv
FOLDER_VARIABLE = "HF_DIFFKV_CACHE"
SHIPPED = Path(__file__).parent / "measured"
# suffixes of files with head losses, and with query moments
TABLE, MOMENTS = ".json", ".safetensors"

# logger for suggestions, as opposed to warnings
HINTS = "hf_diffkv.hints"

_logger = logging.getLogger(HINTS)
_told: set[Any] = set()


def user_folder() -> Path:
    """Returns the user's folder of measurements."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_diffkv"
    except RuntimeError:
        # no home folder, as in some containers, so nothing is found and nothing can be written
        return Path(os.devnull) / "hf_diffkv"


def keep(measured: Sensitivity) -> Path:
    """Writes measurements to the user's folder, where `measured_of` finds them. Raises `OSError`."""
    folder = user_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{measured.model_digest}{TABLE}"
    measured.save(path)
    return path


def measured_of(model: Any) -> Sensitivity | None:
    """Returns the measured head losses of a model or its nearest relative, or None.

    If a relative is used, the log names it once.

    Args:
        model: loaded model, or model on the meta device whose weight files are on this machine.
    """
    found = _lookup(model, identity_of(model), TABLE)
    return None if found is None else Sensitivity.load(found)


def weights_known(model: Any) -> bool:
    """Returns whether a model's weights, loaded or in files, can be identified."""
    identity = identity_of(model)
    return identity.digest is not None or identity.mark is not None


def saved_config_of(model: Any) -> Path | None:
    """Returns the path of the configuration saved with a model's files, or None.

    A Hub repository is queried once, for the commit in the Hub's cache. No answer counts as no configuration.

    Args:
        model: loaded model, its configuration, or the name of a folder or repository.
    """
    name = _name_of(model)
    if not name:
        return None
    local = Path(name) / hub.CONFIG_NAME
    if local.is_file():
        return local
    return None if Path(name).is_dir() else hub.configuration(os.fspath(name))


def queries_of(model: Any) -> Path | None:
    """Returns the file with a model's query moments (heads/query_moments.py), or None.

    The file next to the model's configuration comes first, whatever the weights, then the file for exactly these
    weights, then the file of the model or relative whose measurements `measured_of` uses.

    Args:
        model: loaded model, or its configuration.
    """
    config = saved_config_of(model)
    if config is not None:
        near = config.with_name(hub.QUERIES_NAME)
        if near.is_file():
            return near
        name = os.fspath(_name_of(model))
        fetched = None if Path(name).is_dir() else hub.file_of(name, config.parent.name, hub.QUERIES_NAME)
        if fetched is not None:
            return fetched
    identity = identity_of(model)
    own = _by_digest(identity, MOMENTS)
    if own is not None:
        return own
    table = _lookup(model, identity, TABLE)
    same = None if table is None else table.with_suffix(MOMENTS)
    return same if same is not None and same.is_file() else _lookup(model, identity, MOMENTS)


def queries_path(digest: str) -> Path:
    """Returns the path in the user's folder for the query moments of a model with these weights."""
    return user_folder() / f"{digest}{MOMENTS}"


def suggest_calibration(model: Any) -> None:
    """Suggests measuring a model's heads to save memory, once per model with identifiable weights."""
    if weights_known(model):
        _tell_how(
            model,
            "the heads of %s have not been measured, so all of them get the same bits: `hf-diffkv calibrate --model "
            "%s` measures them once and saves about a fifth of the cache, with about the same answers "
            "(docs/calibration.md).",
        )


def suggest_query_calibration(model: Any) -> None:
    """Suggests measuring a loaded model's queries to lose less, once per model."""
    _tell_how(
        model,
        "the queries of %s have not been measured, so generated keys are rounded to the nearest code: run `hf-diffkv "
        "calibrate --model %s` again, which measures them as well (docs/calibration.md).",
    )


def _tell_how(model: Any, text: str) -> None:
    name = loaded_from(model)
    if name:
        _tell(text, name, shlex.quote(name))


def _tell(text: str, *values: Any) -> None:
    if (text, *values) not in _told:
        _told.add((text, *values))
        _logger.warning(text, *values)


def _lookup(model: Any, identity: Identity, suffix: str) -> Path | None:
    """Returns the file of measurements of a model with this identity or its nearest relative, or None."""
    found = _by_digest(identity, suffix)
    if found is not None or identity.mark is None:
        return found
    best = nearest(identity.mark, [*marks_in(user_folder(), suffix), *marks_in(SHIPPED, suffix)])
    if best is None:
        return None
    path, distance = best
    if distance > SAME:
        _tell(
            "the heads of %s have not been measured, but its normalisation weights nearly match those of a measured "
            "model, whose measurements are used: %s (docs/calibration.md).",
            *(loaded_from(model) or "this model", path),
        )
    return path


def _by_digest(identity: Identity, suffix: str) -> Path | None:
    """Returns the file of measurements of exactly these weights, or None."""
    digest = identity.digest
    if digest is None:
        return None
    shipped = _shipped().get(digest)
    known = [user_folder() / f"{digest}{suffix}", *([] if shipped is None else [shipped.with_suffix(suffix)])]
    # unlike Path.is_file, this is False for unreadable paths, such as another user's home
    return next((path for path in known if os.path.isfile(path)), None)


@cache
def _shipped() -> dict[str, Path]:
    """Returns the shipped files by digest of the weights."""
    return {json.loads(path.read_text())["model_digest"]: path for path in sorted(SHIPPED.glob(f"*{TABLE}"))}


def _name_of(model: Any) -> str | os.PathLike:
    """Returns the name or folder that a loaded model or its configuration came from, and names unchanged."""
    if isinstance(model, (str, os.PathLike)):
        return model
    return getattr(getattr(model, "config", model), "name_or_path", "")
