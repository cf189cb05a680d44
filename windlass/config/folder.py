"""Where a user's own settings are: of the user, and of no project."""

import os
from pathlib import Path


def folder() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "windlass"
