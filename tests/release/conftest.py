"""A small run from scratch, to export."""

from pathlib import Path

import pytest

from tests import trained


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The one run that others look at too; nobody may change it."""
    return trained.only_run(trained.workplace(tmp_path_factory))
