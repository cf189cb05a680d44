"""The hash of the source, by which two checkouts of one version are told apart."""

import shutil
from pathlib import Path

import windlass
from windlass.version import source_hash


def test_another_line_in_any_file_is_another_source(tmp_path):
    package = Path(windlass.__file__).parent
    copy = shutil.copytree(package, tmp_path / "windlass")
    assert source_hash(copy) == source_hash() != source_hash(package / "cli")
    file = copy / "objectives" / "next_token.py"
    file.write_text(file.read_text() + "# another line\n")
    assert source_hash(copy) != source_hash()
