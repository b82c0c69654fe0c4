"""Files saved with a model, in its folder or its Hub repository."""

from __future__ import annotations

import os
from functools import cache
from json import JSONDecodeError
from pathlib import Path
from typing import Any

CONFIG_NAME = "diffkv_config.json"
# the model's query moments (heads/query_moments.py)
QUERIES_NAME = "diffkv_queries.safetensors"


def find(
    name: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
) -> Path:
    """Finds the configuration file in a folder or Hub repository, and downloads it if not cached.

    Raises:
        FileNotFoundError: the folder or repository does not exist or has no such file.
        OSError: access to the repository is denied, the Hub cannot be reached and the file is not in its cache, or that
            cache is not writable.
    """
    folder = Path(name)
    if (folder / CONFIG_NAME).is_file():
        return folder / CONFIG_NAME
    if folder.is_dir():
        raise FileNotFoundError(
            f"{folder / CONFIG_NAME} does not exist; write it with DiffKVConfig.save_pretrained first."
        )
    if folder.is_file():
        raise FileNotFoundError(
            f"{os.fspath(name)!r} is a file; give a folder with {CONFIG_NAME} that DiffKVConfig.save_pretrained wrote."
        )
    from huggingface_hub import errors, hf_hub_download

    repo = os.fspath(name)
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
            f"{repo!r} is neither a folder nor the id of a Hub repository; write {CONFIG_NAME} with "
            "DiffKVConfig.save_pretrained first."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo} on the Hub has no {CONFIG_NAME}; use DiffKVConfig.for_model, or write one with "
            "DiffKVConfig.push_to_hub."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{CONFIG_NAME} of {repo} is not in the Hub's cache, and the Hub was not queried or could not be reached; "
            "connect (and leave out local_files_only and HF_HUB_OFFLINE), or give a folder."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _hub_error(error, repo, revision, "read") from error
    # a download that broke off; HTTPError belongs to the HTTP client that the Hub's library uses
    except errors.HTTPError as error:
        raise OSError(f"cannot download {CONFIG_NAME} of {repo} ({_reason(error)}); try again later.") from error
    except OSError as error:
        # without an errno, it comes from the Hub's library, not from the file system
        if error.errno is None:
            raise
        raise OSError(
            f"cannot write {CONFIG_NAME} of {repo} into the Hub's cache ({_reason(error)}); give a writable folder as "
            "cache_dir, or as the environment variable HF_HOME."
        ) from error
    return Path(found)


def cached(repo: str, file: str) -> str | None:
    """Returns the path of a repository's file in the Hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        known = try_to_load_from_cache(repo, file)
    except HFValidationError:
        return None
    return known if isinstance(known, str) else None


def configuration(repo: str) -> Path | None:
    """Returns the configuration file for the commit of a model in the Hub's cache, or None.

    If the cache does not say whether there is one, the Hub is asked once. No answer counts as none.
    """
    known = cached(repo, "config.json")
    # not remembered, as the model may still be downloaded
    return None if known is None else file_of(repo, Path(known).parent.name, CONFIG_NAME)


@cache
def file_of(repo: str, commit: str, file: str) -> Path | None:
    """Returns a file of a commit, downloaded if not cached, or None if there is none or the Hub does not answer."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    # a string, a marker that the file does not exist, or None if the Hub was never asked
    here = try_to_load_from_cache(repo, file, revision=commit)
    if here is not None:
        return Path(here) if isinstance(here, str) else None
    try:
        # a download would try for half a minute to reach the Hub
        get_hf_file_metadata(hf_hub_url(repo, file, revision=commit))
    except errors.HfHubHTTPError:
        # downloading makes the cache remember that the file does not exist
        pass
    except (errors.HTTPError, OSError):
        return None
    try:
        return Path(hf_hub_download(repo, file, revision=commit))
    except (errors.EntryNotFoundError, errors.HTTPError, OSError):
        return None


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
    """Uploads a configuration in one commit to a Hub repository, which is created if missing.

    Args:
        repo_id: "owner/name" of the repository.
        queries: file with the model's query moments to upload with it, or None.

    Returns:
        The Hub's `CommitInfo`.

    Raises:
        OSError: the Hub cannot be reached or refuses the upload.
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
        raise ValueError(f"repo_id={repo_id!r} is not a repository id; write OWNER/NAME.") from error
    except errors.LocalTokenNotFoundError as error:
        raise OSError(f"no token to write {repo_id} with; log in with `hf auth login`, or give token=.") from error
    except errors.HfHubHTTPError as error:
        raise _hub_error(error, repo_id, revision, "write") from error
    # HTTPError belongs to the HTTP client that the Hub's library uses; a proxy's answer may not be JSON
    except (errors.OfflineModeIsEnabled, errors.HTTPError, JSONDecodeError) as error:
        raise OSError(
            f"cannot reach the Hub to write {repo_id} ({_reason(error)}); connect, or save to a folder."
        ) from error


def _reason(error: Exception) -> str:
    """Returns the message of an error in one line."""
    return " ".join(str(error).split())


def _hub_error(error: Any, repo: str, revision: str | None, doing: str) -> OSError:
    """Converts a response of the Hub into an error with a one-line message."""
    from huggingface_hub import errors

    status = getattr(error.response, "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return OSError(f"{repo} is gated; request access on its Hub page, then log in with `hf auth login`.")
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{repo} on the Hub has no revision {revision!r}; see its branches, tags and commits.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        what = "neither a folder nor a repository" if doing == "read" else "not a repository"
        return FileNotFoundError(
            f"{repo!r} is {what} on the Hub that you may {doing}; check the name, and log in with `hf auth login` (or "
            "give token=) if it is private or yours."
        )
    return OSError(f"the Hub cannot {doing} {repo}: {_reason(error)}; try again later.")
