"""Uploading an export to the Hugging Face Hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.errors import RecipeError, UniRLError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["check_push", "push"]


def check_push(repo: str, *, api: HfApi | None = None) -> None:
    """Raises RecipeError for a name that the hub does not take, and without a token that it knows: before an export,
    which takes minutes."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if repo.count("/") != 1:
        raise RecipeError(f"--push: got {repo!r}, expected OWNER/NAME.")
    if constants.is_offline_mode():
        raise RecipeError("--push: HF_HUB_OFFLINE is set; unset it to reach the hub.")
    try:
        validate_repo_id(repo)
        (api or HfApi()).whoami()
    except HFValidationError as error:
        raise RecipeError(f"--push: {error}") from error
    except LocalTokenNotFoundError as error:
        raise RecipeError(
            "--push: no token of the hub is here; log in with `hf auth login`, or set HF_TOKEN."
        ) from error
    except _failures() as error:
        raise RecipeError(f"--push: the hub does not answer as it should: {error}") from error


def push(folder: Path, repo: str, *, public: bool, step: int, api: HfApi | None = None) -> str:
    """Upload a folder as one commit, and make the repository, private unless `public`, if it does not exist. Files of
    earlier uploads that the folder lacks stay. Returns the address of the commit.

    Raises UniRLError when the hub refuses it or cannot be reached; the folder is kept.
    """
    from huggingface_hub import HfApi

    api = api or HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Step {step}")
    # A large file that cannot be sent is a RuntimeError of the library's.
    except (*_failures(), RuntimeError) as error:
        raise UniRLError(
            f"--push: {repo} was not uploaded. The export is complete in {folder}; "
            f"`hf upload {repo} {shlex.quote(str(folder))}` tries again. The hub says: {error}"
        ) from error
    return str(done.commit_url)


def _failures() -> tuple[type[Exception], ...]:
    """What a request raises: errors of the client for HTTP, which is another one in each release, and refusals of the
    hub, which are both."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
