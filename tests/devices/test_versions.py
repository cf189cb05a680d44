"""Versions of JAX's packages: which go together, and what is said of those that do not."""

import subprocess
import sys
from importlib import metadata

import pytest

from tests import trained
from windlass.devices import versions
from windlass.devices.versions import disagreements, fits, refusal

WANTED = [
    "jaxlib<=0.10.2,>=0.10.1",
    "numpy>=2.0",
    'jaxlib==0.10.1; extra == "minimum-jaxlib"',
    'libtpu==0.0.42.*; extra == "tpu"',
    'jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda"',
    'jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda12"',
]
GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2"}


@pytest.mark.parametrize(
    "version, bounds, is_within",
    [
        ("0.10.2", "<=0.10.2,>=0.10.1", True),
        ("0.10.0", "<=0.10.2,>=0.10.1", False),
        ("0.11", "<=0.10.2,>=0.10.1", False),
        ("0.10.2.dev20261117", "<=0.10.2", True),
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.48", "==0.0.42.*", False),
        ("1.2", "==1.2.0", True),
    ],
)
def test_bounds_are_read_as_packages_write_them(version, bounds, is_within):
    assert fits(version, bounds) == is_within


@pytest.mark.parametrize(
    "others, said",
    [
        ({}, {}),
        ({"libtpu": "0.0.42", "jax-cuda12-plugin": "0.10.2"}, {}),
        (
            {"jaxlib": "0.9.0"},
            {
                "jaxlib": "jaxlib 0.9.0 is installed, and jax 0.10.2 needs 0.10.1 to 0.10.2; "
                "`pip install windlass-lm` installs one that fits"
            },
        ),
        (
            {"libtpu": "0.0.17"},
            {
                "libtpu": "libtpu 0.0.17 is installed, and jax 0.10.2 needs 0.0.42.*; "
                "`pip install 'windlass-lm[tpu]'` installs one that fits"
            },
        ),
        (
            {"jaxlib": "0.10.1", "jax-cuda12-plugin": "0.10.2"},
            {
                "jax-cuda12-plugin": "jax-cuda12-plugin 0.10.2 is installed, and it works with a "
                "jaxlib of 0.10.2 alone; `pip install 'windlass-lm[cuda]'` installs one that fits"
            },
        ),
        ({"jaxlib": None}, {"jaxlib": "jaxlib is missing; `pip install windlass-lm` installs it"}),
    ],
)
def test_packages_that_do_not_go_with_jax_are_named_with_what_would(monkeypatch, others, said):
    monkeypatch.setattr(metadata, "requires", lambda name: WANTED)
    assert dict(disagreements((GOOD | others).get)) == said


def test_the_installed_packages_agree():
    assert versions.disagreement("jaxlib") is None


def test_an_error_of_something_else_is_not_explained():
    assert refusal(RuntimeError("the disk is on fire")) is None


def test_a_jaxlib_that_does_not_fit_is_said_without_a_traceback(tmp_path):
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib/__init__.py").touch()
    (tmp_path / "jaxlib/version.py").write_text('__version__ = "0.4.1"\n')
    around = trained.environment()
    around["PYTHONPATH"] = f"{tmp_path}:{around['PYTHONPATH']}"
    for words in (["train", "quickstart"], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-m", "windlass", *words],
            cwd=tmp_path,
            env=around,
            capture_output=True,
            text=True,
        )
        assert done.returncode == (2 if words[0] == "train" else 1)
        assert (
            "JAX does not start: jaxlib is version 0.4.1, but this version of jax"
            in done.stdout + done.stderr
        )
        assert "`pip install windlass-lm` installs one that fits" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
