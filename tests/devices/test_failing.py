"""Accelerators that are here and do not work, with JAX's own errors, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import trained
from tests.devices import faked
from windlass.devices import failing, holders, versions
from windlass.devices.holders import Holder

BUSY = "ABORTED: The TPU is already in use by process with pid 4123. Not attempting to load it"
HELD = "ABORTED: Internal error when accessing libtpu multi-process lockfile."
NONE = "NOT_FOUND: TPU initialization failed: No jellyfish device found."
NO_FILE = (
    "INTERNAL: Failed to open libtpu.so: libtpu.so: cannot open shared object file: No such file "
    "or directory"
)
BROKEN = "INTERNAL: Failed to open /x/libtpu.so: /x/libtpu.so: invalid ELF header"
HOLDERS = holders.holders
PYTHON = Holder(4123, "python train.py", "/dev/accel0")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with the packages of JAX in versions that agree, whose chips nobody holds."""
    monkeypatch.setattr(holders, "holders", lambda patterns: [])
    monkeypatch.setattr(versions, "disagreement", lambda name: None)
    monkeypatch.setattr(versions, "cuda_plugin", lambda: "jax-cuda12-plugin")


@pytest.mark.parametrize(
    "kind, error, reason",
    [
        ("tpu", None, "libtpu is missing, its library; `pip install 'windlass-lm[tpu]'` has it"),
        ("tpu", NO_FILE, "libtpu is missing, its library; `pip install 'windlass-lm[tpu]'` has"),
        ("tpu", BROKEN, f"{BROKEN}; libtpu may be damaged: `pip uninstall libtpu`, then `pip inst"),
        ("tpu", BUSY, f"{BUSY}; process 4123 (unknown) uses it: end it, or wait until it ends"),
        ("tpu", HELD, f"{HELD[:-1]}; no process of this user holds it: `sudo lsof -w /dev/accel* "),
        ("tpu", NONE, f"{NONE[:-1]}; `windlass doctor` looks for the cause"),
        ("gpu", None, "jax-cuda12-plugin gives no reason; `nvidia-smi` shows whether the driver "),
        ("gpu", "cuInit(0) failed: x", "cuInit(0) failed: x; `nvidia-smi` shows whether the dri"),
    ],
)
def test_a_reason_is_jaxs_own_with_what_to_do(kind, error, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(holders, "PROC", tmp_path)
    assert failing.why(kind, error).startswith(reason)


@pytest.mark.parametrize(
    "kind, error", [("tpu", BUSY), ("tpu", HELD), ("tpu", NONE), ("gpu", "CUDA: out of memory")]
)
def test_who_holds_the_chip_is_named(kind, error, monkeypatch):
    monkeypatch.setattr(holders, "holders", lambda patterns: [PYTHON])
    end = "process 4123 (python train.py) has /dev/accel0 open: end it, or wait until it ends"
    assert failing.why(kind, error) == f"{error.rstrip('.')}; {end}"


def test_versions_that_disagree_are_the_reason(monkeypatch):
    monkeypatch.setattr(versions, "disagreement", lambda name: f"{name} does not fit")
    assert failing.why("tpu", BROKEN) == f"{BROKEN}; libtpu does not fit"
    assert failing.why("gpu", None) == "jax-cuda12-plugin does not fit"
    monkeypatch.setattr(versions, "cuda_plugin", lambda: None)
    assert failing.why("gpu", None).startswith("JAX's CUDA plugin is missing; `pip install ")


def test_gpus_that_are_hidden_are_not_failing(monkeypatch):
    monkeypatch.setattr(failing, "glob", lambda pattern: ["/dev/nvidia0"])
    assert failing.has_gpu()
    for value in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert not failing.has_gpu()


def test_a_process_that_has_a_file_open_is_found_by_its_program_and_script(tmp_path):
    file = tmp_path / "accel0"
    file.touch()
    hold = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    script = tmp_path / "hold.py"
    script.write_text(hold)
    words = [sys.executable, str(script), str(file), "--token=secret"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(words, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        (found,) = HOLDERS([str(tmp_path / "accel*")])
        process.stdin.close()
    assert (found.pid, found.file) == (process.pid, str(file))
    assert found.program == f"{Path(sys.executable).name} hold.py"
    assert HOLDERS([str(tmp_path / "accel*")]) == []


def said(how: str, *words: str, code: int = 2, **environ: str) -> str:
    """Messages of the program on a machine with a failing accelerator."""
    done = faked.run(how, *words, environ=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_training_stops_at_a_busy_tpu_with_jaxs_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = said("busy_tpu", "train", "quickstart")
    assert text.startswith(
        "a TPU is here and does not answer: ABORTED: The TPU is already in use by process with "
        f"pid {os.getpid()}. Not attempting to load libtpu.so in this process; process "
    )
    assert text.endswith(
        "device=cpu runs without it, and device.fallback=true goes on with the best there is\n"
    )
    assert not (tmp_path / "runs").exists()
    required = said("busy_tpu", "train", "quickstart", JAX_PLATFORMS="tpu,cpu")
    assert required == text
    alone = said("busy_tpu", "train", "quickstart", JAX_PLATFORMS="tpu")
    assert alone.endswith("; no other device is present\n")


@pytest.mark.long
def test_training_stops_at_a_libtpu_that_is_damaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"no library")
    text = said("tpu", "train", "quickstart", TPU_LIBRARY_PATH=str(library))
    assert text.startswith("a TPU is here and does not answer: ")
    assert "libtpu.so: file too short" in text and "libtpu may be damaged" in text


@pytest.mark.parametrize(
    "how", ["failing_cuda", pytest.param("refusing_cuda", marks=pytest.mark.long)]
)
def test_training_stops_at_a_cuda_plugin_that_does_not_start(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = said(how, "train", "quickstart")
    assert text.startswith(
        "a GPU is here and does not answer: operation cuInit(0) failed: CUDA_ERROR_SYSTEM_NOT_READY"
    )
    assert len(text.splitlines()) == 1


@pytest.mark.long
def test_with_fallback_training_goes_on_and_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [*trained.SMALL, "device.fallback=true", "train.sample=null"]
    text = said("failing_cuda", "train", "quickstart", *keys, code=0)
    assert "warning: a GPU is here and does not answer: operation cuInit(0) failed" in text
    assert "device       1 × cpu" in text


@pytest.mark.skipif(failing.has_tpu() or failing.has_gpu(), reason="an accelerator is attached")
def test_a_machine_without_accelerators_has_none_that_fail():
    ask = "from windlass.devices import failing, selection; "
    ask += "print(failing.reasons(selection.present()))"
    environ = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    words = [sys.executable, "-c", ask]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
