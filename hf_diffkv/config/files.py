"""Files of configurations: `diffkv_config.json` in a folder or in a repository of the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .presets import close_preset

CONFIG_NAME = "diffkv_config.json"
# moments of the model's queries in the same folder (store/query_moments.py)
QUERIES_NAME = "diffkv_queries.safetensors"
# key of the measurements by which a configuration was chosen
CALIBRATION = "calibration"
# fields that `to_dict` of every release wrote
FIRST_FIELDS = {
    *("high", "low", "alpha_high", "alpha_low", "window", "policy", "observation_window"),
    *("page_bytes", "max_bytes"),
}
# fields that early releases did not have, and their behaviour; other new fields have defaults that change nothing
ADDED_FIELDS = {"rotate": False, "center": False, "sinks": 0, "metadata_bits": 32}


# removed fields: the value that changed nothing, and the remedy for any other value
REMOVED_FIELDS: dict[str, tuple[Any, str]] = {
    "compaction_interval": (1, "every step compacts"),
    "pin": (None, "sinks=N keeps the first N tokens as they are"),
    "protected_layers": (0, "alpha_high and alpha_low with a number for each layer keep layers high, by 0 in both"),
}


def to_text(fields: dict[str, Any], calibration: dict[str, Any] | None) -> str:
    """Returns the text of a configuration file: the fields, and the calibration if there is one."""
    values = fields if calibration is None else {**fields, CALIBRATION: calibration}
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def from_text(text: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Parses a text of `to_text` to fields and calibration. Raises `ValueError` for another text."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a DiffKV config must be a JSON object.")
    calibration = values.pop(CALIBRATION, None)
    return values, calibration


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Converts the fields that `to_dict` of any release gave to those of this release.

    Fields that the other release did not have get the values of its behaviour. Removed fields are dropped if they
    changed nothing; others stay and are refused later (`removed_field`).
    """
    if set(values) >= FIRST_FIELDS:
        values = {**ADDED_FIELDS, **values}
    return {name: value for name, value in values.items() if not _changes_nothing(name, value)}


def removed_field(names: Collection[str]) -> str | None:
    """Returns the complaint about the first removed field among `names`, or None."""
    name = next((name for name in sorted(names) if name in REMOVED_FIELDS), None)
    return None if name is None else f"{name} was removed: {REMOVED_FIELDS[name][1]}; leave {name} out."


def _changes_nothing(name: str, value: Any) -> bool:
    return name in REMOVED_FIELDS and value == REMOVED_FIELDS[name][0]


def new_folder(save_directory: str | os.PathLike) -> Path:
    """Returns a folder to save into, which is made if missing. Raises `ValueError` if it cannot be a folder."""
    if not isinstance(save_directory, (str, os.PathLike)):
        raise ValueError(f"save_directory={save_directory!r} must be the path of a folder.")
    folder = Path(save_directory)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_directory={str(folder)!r} is a file; name a folder, it is made if missing.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find(
    name: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
) -> Path:
    """Finds the configuration file of a folder, or of a repository of the Hub, and downloads it if not cached.

    Raises:
        FileNotFoundError: the folder or repository does not exist or has no such file; the message says so if the name
            looks like a preset.
        OSError: the repository may not be read, or the Hub cannot be reached and the file is not in its cache.
    """
    folder = Path(name)
    if (folder / CONFIG_NAME).is_file():
        return folder / CONFIG_NAME
    if folder.is_dir():
        raise FileNotFoundError(
            f"{folder / CONFIG_NAME} does not exist; write it with DiffKVConfig.save_pretrained first."
        )
    repo = os.fspath(name)
    preset = None if "/" in repo else close_preset(repo)
    if preset is not None:
        raise FileNotFoundError(f"{repo!r} is no folder; did you mean --preset {preset} (preset={preset!r} in Python)?")
    from huggingface_hub import errors, hf_hub_download

    try:
        found = hf_hub_download(
            repo,
            CONFIG_NAME,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            local_files_only=local_files_only,
        )
    except errors.HFValidationError as error:
        raise FileNotFoundError(
            f"{repo!r} is no folder, and no id of a repository of the Hub; write {CONFIG_NAME} with "
            "DiffKVConfig.save_pretrained first."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo} on the Hub has no {CONFIG_NAME}; use DiffKVConfig.for_model, or write one with "
            "DiffKVConfig.push_to_hub."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{CONFIG_NAME} of {repo} is not in the Hub's cache, and the Hub was not asked or could not be reached; "
            "connect (and leave out local_files_only and HF_HUB_OFFLINE), or give a folder."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _hub_error(error, repo, revision, "read") from error
    return Path(found)


def push(
    text: str,
    repo_id: str,
    *,
    queries: Path | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    commit_message: str = f"Upload {CONFIG_NAME}",
) -> Any:
    """Uploads a configuration in one commit to a repository of the Hub, which is made if missing.

    Args:
        text: text of the configuration's file.
        repo_id: "owner/name" of the repository.
        queries: file with the moments of the model's queries to upload with it, or None.

    Returns:
        The Hub's `CommitInfo`.

    Raises:
        OSError: the Hub cannot be reached or refuses.
        ValueError: `repo_id` is not the id of a repository.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, errors

    uploads = [CommitOperationAdd(CONFIG_NAME, text.encode())]
    if queries is not None:
        uploads.append(CommitOperationAdd(QUERIES_NAME, queries))
    api = HfApi(token=token, library_name="hf-diffkv")
    try:
        return api.create_commit(
            api.create_repo(repo_id, private=private, exist_ok=True).repo_id,
            uploads,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
    except errors.HFValidationError as error:
        raise ValueError(f"repo_id={repo_id!r} is no id of a repository; write OWNER/NAME.") from error
    except errors.LocalTokenNotFoundError as error:
        raise OSError(f"no token to write {repo_id} with; log in with `hf auth login`, or give token=.") from error
    except errors.HfHubHTTPError as error:
        raise _hub_error(error, repo_id, revision, "write") from error
    # HTTPError belongs to the HTTP client that the Hub's library uses
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise OSError(f"cannot reach the Hub to write {repo_id} ({reason}); connect, or save to a folder.") from error


def _hub_error(error: Any, repo: str, revision: str | None, doing: str) -> OSError:
    """Converts an answer of the Hub to an error with a one-line message."""
    from huggingface_hub import errors

    status = getattr(error.response, "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return OSError(f"{repo} is gated; ask for access on its page of the Hub, then log in with `hf auth login`.")
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{repo} on the Hub has no revision {revision!r}; see its branches, tags and commits.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        what = "neither a folder nor a repository" if doing == "read" else "no repository"
        return FileNotFoundError(
            f"{repo!r} is {what} of the Hub that you may {doing}; check the name, and log in with `hf auth login` (or "
            "give token=) if it is private or yours."
        )
    return OSError(f"the Hub cannot {doing} {repo}: {' '.join(str(error).split())}; try again later.")
