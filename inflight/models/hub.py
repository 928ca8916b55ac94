"""Models of the Hugging Face hub: which commit a revision is, and its files in the hub's own cache.

What is downloaded is what transformers and vLLM load: safetensors, JSON, tokenizer files and chat templates, of the
repository's top folder; Python files where the user trusts them. A commit whose files are all there is not asked for
again. Where the cache is, which endpoint, token and proxy are used: huggingface_hub's own environment variables.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from inflight.error_line import one_line, with_kind
from inflight.models.weight_files import INDEX, WHOLE

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CODE = "*.py"
# The hub's patterns take "*" across folders; of folders only additional_chat_templates/ is read by transformers.
OTHER = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors", "adapter_model*.safetensors")
"""Weights in formats of other programs, mostly: as large as the model itself."""
ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
    """A model of the hub that can't be had; one line that says why and what to do."""


class NotCached(HubError):
    """A model that is not in the cache, or not completely: `fetch` may download it."""


def is_id(name: str) -> bool:
    """Whether it has the form OWNER/NAME."""
    return ID.fullmatch(name) is not None


def fetch(model_id: str, revision: str = "", *, code: bool = False) -> str:
    """Downloads what a run needs of a model and the cache does not hold; the commit of the revision, 40 hex digits.

    An empty revision is the default branch. Where the hub can't be reached, or HF_HUB_OFFLINE is set, the cache's
    latest copy of the revision is taken; `snapshot` then checks that the weights are there. Raises HubError for a model
    or revision that does not exist, is gated, or is neither reachable nor cached.
    """
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = _snapshot(model_id, revision, allow_patterns=[*FILES, *([CODE] if code else [])])
    if COMMIT.fullmatch(folder.name) is None:
        raise HubError(f"model {model_id!r}: the hub gives {folder.name!r} for its revision, which is no commit")
    return folder.name


def cached_commit(model_id: str, revision: str = "") -> str:
    """The commit of a revision's newest copy in the cache. Raises NotCached when there is none."""
    return _snapshot(model_id, revision, allow_patterns=list(FILES), local_files_only=True).name


def snapshot(model_id: str, commit: str) -> Path:
    """The directory of a commit that was fetched before; nothing is downloaded.

    Raises HubError when it is not in the cache.
    """
    if COMMIT.fullmatch(commit) is None:
        raise HubError(
            f"model {model_id!r} is a model of the hub: download it (inflight model {model_id}) and give the directory"
            " that this prints"
        )
    folder = _snapshot(model_id, commit, allow_patterns=list(FILES), local_files_only=True)
    _require_whole(model_id, folder)
    return folder


def _snapshot(model_id: str, revision: str, **settings: Any) -> Path:
    """huggingface_hub's `snapshot_download`, its errors in one line."""
    from huggingface_hub import errors, snapshot_download

    what = f"model {model_id!r}" + (f", revision {revision!r}," if revision else "")
    try:
        return Path(snapshot_download(model_id, revision=revision or None, ignore_patterns=list(OTHER), **settings))
    except errors.GatedRepoError:
        page = f"{_endpoint()}/{model_id}"
        raise HubError(
            f"model {model_id!r} is gated: accept its terms at {page}, then give a token of that account (hf auth"
            " login, or HF_TOKEN)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"model {model_id!r} is neither a directory here nor a model of {_endpoint()}; private ones need a token"
            " (hf auth login, or HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"model {model_id!r} has no revision {revision!r} (model.revision) at {_endpoint()}") from None
    except errors.LocalEntryNotFoundError as error:
        raise NotCached(f"{what} {_not_cached(model_id, revision, error, settings)}") from None
    except errors.HfHubHTTPError as error:
        raise HubError(
            f"{what} can't be downloaded: {_endpoint()} answers {error.response.status_code}: {one_line(error)}"
        ) from None
    except (errors.HFValidationError, OSError, ValueError, RuntimeError) as error:
        raise HubError(f"{what} can't be downloaded: {one_line(error)}") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # which of its versions the hub's client uses is its own
            raise
        reason = with_kind(error)
        raise HubError(f"{what} can't be downloaded from {_endpoint()}: {reason}") from None


def _not_cached(model_id: str, revision: str, error: Exception, settings: dict[str, Any]) -> str:
    from huggingface_hub import constants

    command = f"inflight model {model_id}" + (f" --revision {revision}" if revision else "")
    state = f"is not in the cache, {constants.HF_HUB_CACHE}, or not completely"
    if settings.get("local_files_only"):
        return f"{state}; download it: {command}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{state}, and HF_HUB_OFFLINE forbids to download it: unset that, or run `{command}` where the hub can be"
            " reached and copy the cache (HF_HOME), or give a directory as model.name"
        )
    cause = error.__cause__
    return f"{state}, and {_endpoint()} can't be reached: {one_line(cause or error)}; or give a directory as model.name"


def _require_whole(model_id: str, folder: Path) -> None:
    """Raises HubError unless the directory has a configuration and all of its weights, as safetensors."""
    if not (folder / "config.json").is_file():
        raise HubError(f"model {model_id!r} has no config.json: it is no model that transformers loads")
    if (folder / WHOLE).is_file():
        return
    if not (folder / INDEX).is_file():
        raise HubError(
            f"model {model_id!r} has no safetensors ({WHOLE} or {INDEX}); other formats are not loaded: convert it with"
            " transformers' save_pretrained, and give that directory as model.name"
        )
    try:
        files = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"model {model_id!r}: its {INDEX} can't be read: {one_line(error)}") from None
    missing = sorted(str(name) for name in files if not (folder / str(name)).is_file())
    if missing:
        count = f"{len(missing)} of {len(files)}"
        raise NotCached(f"model {model_id!r}: {count} files with weights are missing: {missing[0]}")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids downloads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
