"""Uploading an export to the Hugging Face hub, with the token of the hub's own login."""

from pathlib import Path

from windlass.errors import UserError
from windlass.version import __version__


def check(name: str) -> None:
    """Refuse, before anything is written, what cannot be pushed."""
    from huggingface_hub import constants, errors, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except errors.HFValidationError:
        raise UserError(f"--push is {name}; it must be OWNER/NAME, as the hub writes it") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "--push needs the hub, which is not contacted, since HF_HUB_OFFLINE is set; without "
            f"--push the folder is written, and `hf upload {name} FOLDER` uploads it later"
        )
    if get_token() is None:
        raise UserError(
            "--push needs an account of the hub, and nobody is logged in on this machine; "
            "`hf auth login` does that, with a token that may write"
        )


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder to a repository, created where there is none; returns its address."""
    from huggingface_hub import HfApi, errors

    # Of whichever client the library is built on; pyright wants it named where it comes from.
    transport = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]

    api = HfApi(library_name="windlass", library_version=__version__)
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message="Upload from windlass"
        )
    except errors.HfHubHTTPError as refused:
        status = refused.response.status_code
        why = f"the hub answered {status}: {refused.server_message or 'nothing more'}"
        if status in (401, 403):
            why += f". The login on this machine may not write {name}; `hf auth login` changes it"
        raise UserError(_not_pushed(folder, name, private, why)) from None
    except (transport, OSError) as unreachable:
        why = f"the hub cannot be reached from here ({unreachable})"
        raise UserError(_not_pushed(folder, name, private, why)) from None
    return str(repository)


def _not_pushed(folder: Path, name: str, private: bool, why: str) -> str:
    option = " --private" if private else ""
    return (
        f"{folder} is written, and not pushed: {why}. Once that is put right, "
        f"`hf upload {name} {folder}{option}` uploads it"
    )
