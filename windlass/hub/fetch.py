"""Files from the Hugging Face hub, in the cache that its other tools share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from windlass.config import listing
from windlass.errors import UserError
from windlass.files import FULL

# What cuts images and video for a model that reads them, of which no part is used here.
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
CONFIGS = ("config.json", "generation_config.json", *PROCESSORS)
TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "chat_template.*")
# Nothing that is pickled, and nothing that is a program: reading a model runs no code of it.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
CARD = "README.md"  # the model card, which names the licence
NAMED = 8  # models in a message


class Fetched(NamedTuple):
    """Files of a repository at one commit."""

    folder: Path
    revision: str  # the commit's full hash


def place() -> Path:
    """Cache folder of the hub's files."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch(
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    kind: Literal["model", "dataset"] = "model",
    key: str = "model.hub",
) -> Fetched:
    """Download of those files of a repository that match, or their copy in the cache.

    `key` is how the recipe names the repository. The token, where one is needed, is that of the
    hub's own login.
    """
    from huggingface_hub import constants, errors, snapshot_download

    client_error: Any = errors.HfHubHTTPError.__bases__[0]  # of its HTTP client, whichever it is
    cache = place()
    section, where = key.rpartition(".")[0], f"{key} is {name}"

    def download(**how: Any) -> str:
        return snapshot_download(
            name,
            repo_type=kind,
            revision=revision,
            cache_dir=cache,
            endpoint=constants.ENDPOINT,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"] if kind == "model" else None,
            **how,
        )

    try:
        try:
            folder = download()
        except errors.OfflineModeIsEnabled:  # the first releases contact the hub even then
            folder = download(local_files_only=True)
    except errors.HFValidationError:
        raise UserError(f"{where}; it must be OWNER/NAME, as the hub writes it") from None
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        raise UserError(
            f"{where}, which is open only to those who accept its terms: do so on {page}, and then "
            "`hf auth login` on this machine"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{where}; the hub has no {kind} of that name that may be read from here. The spelling "
            "is OWNER/NAME; a private one needs `hf auth login` with an account that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{section}.revision is {revision}; {name} has no branch, tag or commit of that name"
        ) from None
    except errors.LocalEntryNotFoundError as missing:
        raise UserError(_offline(where, name, kind, cache, missing)) from None
    except client_error as error:
        raise UserError(
            f"{where}; the hub stopped answering ({str(error).splitlines()[0]}); the same command "
            "again goes on with what is missing"
        ) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"{where}; there is no room for it in {cache}: {error.strerror}. HF_HOME names another "
            "place, and `hf cache` lists what is there"
        ) from None
    return Fetched(Path(folder), Path(folder).name)


def _offline(where: str, name: str, kind: str, cache: Path, missing: Exception) -> str:
    from huggingface_hub import constants, errors

    why = f"the hub cannot be reached from here ({missing.__cause__ or missing})"
    if constants.HF_HUB_OFFLINE:
        why = "the hub is not contacted, since HF_HUB_OFFLINE is set"
    there = sorted(cache.glob(f"{kind}s--*--*"))
    names = [folder.name.split("--", 1)[1].replace("--", "/", 1) for folder in there]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    known = listing([*names[:NAMED], *more], "and") if names else f"no {kind}"
    is_part = type(missing) is not errors.LocalEntryNotFoundError  # of which it is a kind
    partly = "only a part of it" if is_part else "not"
    option = "" if kind == "model" else " --repo-type dataset"
    return (
        f"{where}; {why}, and it is {partly} in {cache}, which has {known}. Where there is a "
        f"connection, `hf download {name}{option}` fills that folder, which can be copied here, "
        f"and with --local-dir FOLDER makes one that a recipe names by its path"
    )
