"""The package as it is built and installed, away from the source."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import jsonschema
import pytest

from tests import trained
from tests.test_hints import NEEDED
from windlass.config import shipped
from windlass.config.text import parse

ROOT = Path(__file__).parents[1]
# libtpu has wheels for x86-64 alone, as TPU hosts are.
HERE = {*NEEDED} - ({"tpu"} if platform.machine() != "x86_64" else set())


@pytest.fixture(scope="module")
def bin(tmp_path_factory) -> Path:
    """The programs of an environment into which the wheel was installed.

    What the package needs is lent by the environment of the tests, so that nothing is downloaded.
    A path in a .pth file is searched for packages, but not for further .pth files: a source tree
    that is installed there for editing stays out of sight.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(sys.executable, *build)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv/bin/python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(sys.executable, "-m", "pip", "--python", str(python), *install)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    lent = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "lent.pth").write_text("\n".join(lent))
    return python.parent


@pytest.fixture(scope="module")
def fresh(bin, tmp_path_factory) -> Path:
    """The programs of an environment with nothing but the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", str(folder))
    (wheel,) = bin.parents[1].glob("*.whl")
    try:
        run(folder / "bin/python", "-m", "pip", "install", "--quiet", str(wheel))
    except AssertionError as failed:
        pytest.skip(f"the index cannot be reached: {str(failed)[-200:]}")
    return folder / "bin"


@pytest.fixture
def empty(tmp_path) -> Path:
    return tmp_path


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = trained.environment()
    del environment["PYTHONPATH"]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_imported_is_what_was_installed(bin, empty):
    where = run(bin / "python", "-c", "import windlass; print(windlass.__file__)", cwd=empty)
    assert Path(where).is_relative_to(bin.parent)


def test_the_recipes_come_with_it_and_both_names_are_the_same_program(bin, empty):
    listed = run(bin / "windlass", "train", cwd=empty)
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(shipped())
    assert run(bin / "python", "-m", "windlass", "train", cwd=empty) == listed


def test_the_example_rows_and_the_script_of_a_launch_come_with_it(bin, empty):
    script = (
        "from importlib import resources\n"
        "from windlass.sources.example import Source\n"
        "print(*[len(Source(name=name)) for name in ('legal', 'chats', 'pairs')])\n"
        "print((resources.files('windlass') / 'launch' / 'tpu_vm.sh').is_file())"
    )
    assert run(bin / "python", "-c", script, cwd=empty) == "60 36 40\nTrue\n"


@pytest.mark.long
def test_quickstart_trains_in_an_empty_folder(bin, empty):
    printed = run(bin / "windlass", "train", "quickstart", *trained.SMALL, cwd=empty)
    (folder,) = (empty / "runs").glob("quickstart-*")
    assert "step 3/3" in printed
    assert (folder / "checkpoints/3").is_dir()
    assert os.listdir(empty) == ["runs"]


def test_the_schema_takes_the_recipes_that_ship_and_no_other_keys(bin, empty):
    schema = json.loads(run(bin / "windlass", "schema", cwd=empty))
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    for name, path in shipped().items():
        recipe, problems = parse(path.read_text(encoding="utf-8"), name)
        assert problems == []
        validator(schema).validate(recipe)
        recipe["train"]["stpes"] = 3
        with pytest.raises(jsonschema.ValidationError, match="stpes"):
            validator(schema).validate(recipe)


@pytest.mark.long
def test_quickstart_trains_in_a_fresh_environment_and_so_does_all_that_it_says_comes_next(
    fresh, empty
):
    printed = run(fresh / "windlass", "train", "quickstart", cwd=empty)
    following = re.findall(r"^next +windlass (.*)$", printed, re.MULTILINE)
    assert following
    for line in following:
        run(fresh / "windlass", *shlex.split(line.replace("FOLDER", "exported")), cwd=empty)


@pytest.mark.long
@pytest.mark.parametrize("extra", sorted(HERE))
def test_every_extra_that_a_message_names_can_be_installed(bin, fresh, extra):
    (wheel,) = bin.parents[1].glob("*.whl")
    how = ["install", "--quiet", "--dry-run", f"{wheel}[{extra}]"]
    run(fresh / "python", "-m", "pip", *how)
