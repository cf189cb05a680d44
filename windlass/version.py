"""The version of Windlass, in its one place, and the hash of its source."""

import hashlib
from pathlib import Path

__version__ = "0.1.0"


def source_hash(package: Path = Path(__file__).parent) -> str:
    """Hash of every Python file of the package: one version may be several checkouts."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
