"""Text of configuration files, and how it differs between releases."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

# key of the measurements from which a configuration was chosen
CALIBRATION = "calibration"
# fields that `to_dict` of every release wrote
FIRST_FIELDS = {
    *("high", "low", "alpha_high", "alpha_low", "window", "policy", "observation_window"),
    *("page_bytes", "max_bytes"),
}
# fields that early releases lacked, with values for their behaviour; defaults of other new fields change nothing
ADDED_FIELDS = {"rotate": False, "center": False, "sinks": 0, "metadata_bits": 32}


# removed fields: the value that had no effect, and the remedy for any other value
REMOVED_FIELDS: dict[str, tuple[Any, str]] = {
    "compaction_interval": (1, "every step compacts"),
    "pin": (None, "sinks=N keeps the first N tokens as they are"),
    "protected_layers": (0, "alpha_high and alpha_low with a number for each layer keep layers high, by 0 in both"),
}


def to_text(fields: dict[str, Any], calibration: dict[str, Any] | None) -> str:
    """Returns the text of a configuration file: the fields, and the calibration if there is one."""
    values = fields if calibration is None else {**fields, CALIBRATION: calibration}
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def from_text(text: str | bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Parses the output of `to_text` into fields and calibration. Raises `ValueError` for other text.

    Bytes may begin with a byte order mark, which some Windows editors write.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a DiffKV config must be a JSON object.")
    calibration = values.pop(CALIBRATION, None)
    if not isinstance(calibration, (dict, type(None))):
        raise ValueError(f"{CALIBRATION}={calibration!r} must be a JSON object; leave it out, or calibrate again.")
    return as_written(values), calibration


def as_written(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a file's fields with `until_full`, None if `max_bytes` comes from a release that pruned for it."""
    return fields if fields.get("max_bytes") is None else {"until_full": None, **fields}


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Converts the fields returned by any release's `to_dict` to those of this release.

    Fields that the other release lacked get values that match its behaviour. Removed fields are dropped if they had no
    effect; others stay and are rejected later (`removed_field`).
    """
    if set(values) >= FIRST_FIELDS:
        values = {**ADDED_FIELDS, **values}
    return {name: value for name, value in values.items() if not _changes_nothing(name, value)}


def removed_field(names: Collection[str]) -> str | None:
    """Returns the error message for the first removed field among `names`, or None."""
    name = next((name for name in sorted(names) if name in REMOVED_FIELDS), None)
    return None if name is None else f"{name} was removed: {REMOVED_FIELDS[name][1]}; leave {name} out."


def _changes_nothing(name: str, value: Any) -> bool:
    return name in REMOVED_FIELDS and value == REMOVED_FIELDS[name][0]


def as_folder(name: str, given: Any) -> Path:
    """Returns `given` as a path. Raises `ValueError`, which contains `name`, unless it is one."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ValueError(f"{name}={given!r} must be the path of a folder.")
    return Path(given)


def new_folder(save_directory: str | os.PathLike) -> Path:
    """Returns a folder to save into, which is created if missing. Raises `ValueError` if it cannot be a folder."""
    folder = as_folder("save_directory", save_directory)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_directory={str(folder)!r} is a file; give a folder, which is created if missing.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
