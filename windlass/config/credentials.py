"""Credentials in URLs, which a run would store with its recipe and print in its pages."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from windlass.config.sections import dotted
from windlass.errors import UserError

_URL = re.compile(r"[a-z][\w.+:-]*://", re.IGNORECASE)
_USER = re.compile(r"(?:^|:)(?P<protocol>[\w.+-]+)://(?P<user>[^/?#\s]*)@", re.IGNORECASE)
_SECRET = re.compile(
    r"token$|secret|passw|credential|(api|access)[_-]?key|signature|^(sig|key|auth\w*)$", re.I
)
INSTEAD = (
    "Leave it out of the URL: https reads ~/.netrc with "
    """FSSPEC_HTTPS='{"client_kwargs": {"trust_env": true}}' in the environment, s3 reads """
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, gs what `gcloud auth application-default login` "
    "left, and the hub what `hf auth login` left"
)


def refuse(tree: Any, origin: str) -> None:
    """Refuse a URL with a password, a token or a signature in it, without repeating it."""
    for key, what in _found(tree, ""):
        raise UserError(
            f"{key} in {origin} is a URL with {what} in it, which would be stored in files of the "
            f"run. {INSTEAD}"
        )


def _found(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _found(value, dotted(key, name))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _found(value, dotted(key, number))
    elif isinstance(tree, str) and _URL.match(tree) and (what := _secret(tree)):
        yield key, what


def _secret(url: str) -> str | None:
    for match in _USER.finditer(url):
        # A user alone is part of an address (`sftp://ada@host`), but for HTTP may be a token.
        if ":" in match["user"] or match["protocol"].lower().endswith(("http", "https")):
            return "a user or a password"
    try:
        query = parse_qsl(urlsplit(url).query)
    except ValueError:  # no URL after all, which is refused where it is read
        return None
    return next((f"a secret ({name})" for name, _ in query if _SECRET.search(name)), None)
