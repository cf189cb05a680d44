"""Requirements that machines install: this package by its origin, no name taken on trust."""

import json
import posixpath
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import windlass
from windlass.errors import UserError
from windlass.launch.description import MOUNT, Bucket, Launch

DISTRIBUTION = "windlass-lm"
PACKAGE = f"{DISTRIBUTION}[tpu]"
# Nothing is ever found under `.invalid`: a file with this in it installs nothing, rather than
# whatever somebody else has given our name.
UNKNOWN = f"{PACKAGE} @ https://windlass.invalid/say-what-with--install"
WOULD = (
    "--install git+https://HOST/OWNER/windlass@COMMIT, --install with the URL of a wheel, or "
    f"--install {MOUNT}/FILE.whl for a wheel in the bucket would do"
)
FOLDER = (
    "windlass is used from a folder of this computer, which no machine can install; --bucket "
    f"gs://NAME uploads a wheel of it, or {WOULD}"
)
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{windlass.__version__}-py3-none-any.whl"


def package(requested: str | None, bucket: Bucket | None) -> str:
    """Requirement for pip: the one requested, or else the origin of this package."""
    if requested is None:
        return came_from(_distribution()) or UNKNOWN
    # The extra that a TPU needs is added where it was left out.
    match = re.fullmatch(r"\s*windlass(-lm)?\s*(\[[\w\s,-]+\])?\s*(|@.*|[=<>!~].*)", requested)
    ours, extra, which = match.groups() if match else ("", "", f"@ {requested.strip()}")
    extra = extra or "[tpu]"
    if not which.startswith("@"):
        if not ours:
            raise UserError(
                f"--install is {requested}, which is another project in the package index; "
                f"this one is {DISTRIBUTION}{which}"
            )
        return f"{DISTRIBUTION}{extra}{which}"
    where = which[1:].strip()
    if posixpath.normpath(where).startswith(f"{MOUNT}/"):
        if bucket is None:
            raise UserError(
                f"--install is {requested}, and there is no --bucket that would be mounted there"
            )
        where = f"file://{posixpath.normpath(where)}"
    elif not re.match(r"(git\+https|git\+ssh|https)://", where):
        raise UserError(f"--install is {requested}, which no machine can install; {WOULD}")
    if "@" in urlsplit(where).netloc and not where.startswith("git+ssh://"):
        raise UserError(
            "--install has a user or a token in its URL, which would be in files and logs; a wheel "
            f"in the bucket needs none: --install {MOUNT}/FILE.whl"
        )
    return f"{DISTRIBUTION}{extra} @ {where}"


def came_from(distribution: Distribution | None) -> str | None:
    """Requirement of an installed package's origin; None: a folder of this computer."""
    if distribution is None:
        return None
    text = distribution.read_text("direct_url.json")
    if text is None:  # from an index, where its version is found again
        return f"{PACKAGE}=={distribution.version}"
    origin: dict[str, Any] = json.loads(text)
    url, source = origin["url"], origin.get("vcs_info")
    if not url.startswith("https://"):
        return None
    url = url if source is None else f"{source['vcs']}+{url}@{source['commit_id']}"
    folder = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    return f"{PACKAGE} @ {url}{folder}"


def clone() -> Path | None:
    """The clone that this package is used from; None where it is in none."""
    root = Path(windlass.__file__).resolve().parents[1]
    about = root / "pyproject.toml"
    is_ours = about.is_file() and f'name = "{DISTRIBUTION}"' in about.read_text(encoding="utf-8")
    return root if is_ours else None


def build(root: Path, place: Path) -> Path:
    """Wheel of a clone, built by pip."""
    # What builds is downloaded where it is not installed.
    here = ["--no-build-isolation"] if find_spec("hatchling") else []
    how = ["wheel", "--quiet", "--no-deps", *here, "--wheel-dir", str(place), str(root)]
    done = subprocess.run([sys.executable, "-m", "pip", *how], capture_output=True, text=True)
    if done.returncode or not (place / WHEEL).is_file():
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UserError(f"no wheel could be built from {root}: {said}; {WOULD}")
    return place / WHEEL


def obstacle(launch: Launch) -> str | None:
    """Reason not to rent yet: a machine would have nothing to install."""
    return FOLDER if UNKNOWN in launch.packages else None


def _distribution() -> Distribution | None:
    """Distribution that is installed, if it is also the one that runs."""
    try:
        dist = Distribution.from_name(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    here = Path(windlass.__file__).resolve()
    return dist if Path(str(dist.locate_file("windlass/__init__.py"))).resolve() == here else None
