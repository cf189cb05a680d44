"""What the machines install."""

import json
import re
import subprocess
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.launch import TARGETS, find, installing
from windlass.launch.description import Bucket
from windlass.launch.preparing import prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WOULD = (
    "--install git+https://HOST/OWNER/windlass@COMMIT, --install with the URL of a wheel, or "
    "--install /bucket/FILE.whl for a wheel in the bucket would do"
)


def installed(folder: Path, origin: dict | None) -> Distribution:
    """A package as pip leaves it in a folder of packages."""
    place = folder / "windlass-0.1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.4\nName: windlass\nVersion: 0.1.0\n")
    if origin is not None:
        (place / "direct_url.json").write_text(json.dumps(origin))
    return Distribution.at(place)


GIT = {"vcs": "git", "commit_id": COMMIT, "requested_revision": "main"}


@pytest.mark.parametrize(
    ("origin", "found"),
    [
        (None, "windlass-lm[tpu]==0.1.0"),
        (
            {"url": "https://github.com/me/windlass.git", "vcs_info": GIT},
            f"windlass-lm[tpu] @ git+https://github.com/me/windlass.git@{COMMIT}",
        ),
        (
            {"url": "https://github.com/me/all", "vcs_info": GIT, "subdirectory": "windlass"},
            f"windlass-lm[tpu] @ git+https://github.com/me/all@{COMMIT}#subdirectory=windlass",
        ),
        (
            {"url": "https://mine.com/windlass-0.1.0-py3-none-any.whl", "archive_info": {}},
            "windlass-lm[tpu] @ https://mine.com/windlass-0.1.0-py3-none-any.whl",
        ),
        ({"url": "file:///home/me/windlass", "dir_info": {"editable": True}}, None),
        ({"url": "file:///home/me/windlass", "vcs_info": GIT}, None),
        ({"url": "file:///home/me/windlass-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
    ],
)
def test_a_package_is_installed_from_where_this_one_came(origin, found, tmp_path):
    assert installing.came_from(installed(tmp_path, origin)) == found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (
            "git+https://github.com/me/it@main",
            "windlass-lm[tpu] @ git+https://github.com/me/it@main",
        ),
        ("windlass @ https://me.com/a.whl", "windlass-lm[tpu] @ https://me.com/a.whl"),
        ("windlass-lm[tpu,hub]==0.2", "windlass-lm[tpu,hub]==0.2"),
        ("windlass-lm", "windlass-lm[tpu]"),
        ("windlass-lm >= 0.2", "windlass-lm[tpu]>= 0.2"),
        ("/bucket/it/windlass.whl", "windlass-lm[tpu] @ file:///bucket/it/windlass.whl"),
    ],
)
def test_what_is_asked_for_is_installed_with_what_a_tpu_needs(asked, found):
    assert installing.package(asked, Bucket("mine", "")) == found


@pytest.mark.parametrize("asked", ["windlass", "windlass[tpu]==0.1.1"])
def test_another_project_of_that_name_is_refused(asked):
    with pytest.raises(
        UserError, match="another project in the package index; this one is windlass-lm"
    ):
        installing.package(asked, None)


@pytest.mark.parametrize("asked", [".", "dist/windlass.whl", "-r more.txt", "torch", "http://a/b"])
def test_what_no_machine_can_install_is_refused(asked):
    with pytest.raises(UserError) as refused:
        installing.package(asked, None)
    assert str(refused.value) == f"--install is {asked}, which no machine can install; {WOULD}"


def test_a_token_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(UserError) as refused:
        installing.package("git+https://me:secret@github.com/me/it", None)
    assert str(refused.value) == (
        "--install has a user or a token in its URL, which would be in files and logs; a wheel in "
        "the bucket needs none: --install /bucket/FILE.whl"
    )


def test_a_wheel_in_a_bucket_needs_the_bucket():
    with pytest.raises(UserError) as refused:
        installing.package("/bucket/windlass.whl", None)
    assert str(refused.value) == (
        "--install is /bucket/windlass.whl, and there is no --bucket that would be mounted there"
    )


@pytest.mark.parametrize("to", TARGETS)
def test_words_for_a_shell_reach_pip_as_they_are(to):
    asked = "git+https://github.com/me/$(touch x)'`id`"
    launch = prepare(
        "quickstart", ["train.batch=64"], on="v6e-8", bucket="gs://mine", install=asked
    )
    text = find(to).write(launch)
    (line,) = [line.strip() for line in text.splitlines() if "pip install" in line]
    line = line.replace("$$", "$") if to == "gke" else line  # as Kubernetes does
    words = f'pip() {{ printf \'%s\\n\' "$@"; }}; uv() {{ pip "$@"; }}\n{line}'
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"windlass-lm[tpu] @ {asked}"


@pytest.mark.parametrize("to", TARGETS)
def test_no_program_of_the_internet_is_piped_into_a_shell(to):
    launch = prepare("quickstart", ["train.batch=64"], on="v6e-8", bucket="gs://mine")
    text = find(to).write(launch)
    assert not re.search(r"\|\s*(sudo\s+)?(ba)?sh\b", text)
    if to != "gke":  # which has Python in its image
        (line,) = [line for line in text.splitlines() if "--require-hashes" in line]
        assert re.search(r"uv==[\d.]+( --hash=sha256:[0-9a-f]{64})+'", line)
