"""Credentials in URLs."""

import pytest

from windlass.config import load
from windlass.config.credentials import INSTEAD
from windlass.errors import UserError

STORED = "which would be stored in files of the run"


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://ada:hunter2@host/rows.jsonl", "a user or a password"),
        ("https://hunter2@host/rows.jsonl", "a user or a password"),
        ("HTTPS://ada:hunter2@host:80/rows.jsonl", "a user or a password"),
        ("s3://key:hunter2@bucket/rows.jsonl", "a user or a password"),
        ("simplecache::http://ada:hunter2@host/rows.jsonl", "a user or a password"),
        ("zip://rows.jsonl::https://ada:hunter2@host/a.zip", "a user or a password"),
        ("https://host/rows.jsonl?sig=hunter2", "a secret (sig)"),
        ("https://host/rows.jsonl?a=1&X-Amz-Signature=hunter2", "a secret (X-Amz-Signature)"),
        ("https://host/rows.jsonl?access_token=hunter2", "a secret (access_token)"),
        ("https://host/rows.jsonl?api-key=hunter2", "a secret (api-key)"),
        ("https://host/rows.jsonl?key=hunter2", "a secret (key)"),
        ("https://host/rows.jsonl?auth=hunter2", "a secret (auth)"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url, what):
    said = f"data.source.path in the recipe is a URL with {what} in it, {STORED}. {INSTEAD}"
    with pytest.raises(UserError) as refused:
        load({"data": {"source": {"kind": "jsonl", "path": url}}})
    assert str(refused.value) == said
    assert "hunter2" not in said
    with pytest.raises(UserError, match="data.mixture.0.path in the recipe is a URL with"):
        load({"data": {"mixture": [{"kind": "jsonl", "path": url}]}})
    with pytest.raises(UserError, match="data.source.path in the command line is a URL with"):
        load({}, [f"data.source.path={url}"])


@pytest.mark.parametrize(
    "text",
    [
        "https://host/rows.jsonl?split=train",
        "https://host/rows.jsonl?max_tokens=100&tokenizer=gpt2",
        "sftp://ada@host/rows.jsonl",
        "abfs://container@account.dfs.core.windows.net/rows.jsonl",
        "gs://bucket/a@b.jsonl",
        "write to ada:hunter2@host or see https://host/?token=hunter2",
        "http://[::1/rows",
    ],
)
def test_other_urls_and_other_texts_are_as_they_are(text):
    assert load({"data": {"source": {"path": text}}}).recipe["data"]["source"]["path"] == text
