"""The config folder of a user: settings of no project."""

import os
from pathlib import Path


def folder() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "windlass"
