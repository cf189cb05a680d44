"""`windlass doctor`: ticks, crosses with what to do, and exit codes for scripts."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import jax
import pytest
from huggingface_hub import constants

from tests import trained
from tests.devices import faked
from windlass.api.checkup import access, machine, smoke
from windlass.devices import versions
from windlass.errors import UserError
from windlass.telemetry import compile_cache
from windlass.telemetry.compile_cache import Kept

STAGES = ["device", "data", "loop", "gradient sync", "checkpoint", "resume"]


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """A user without credentials, and a machine with room."""
    for name in ("HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    monkeypatch.setattr(machine, "LEAST_MEMORY", 0)
    monkeypatch.setattr(machine, "LEAST_DISK", 0)
    monkeypatch.setattr(access, "SLOWEST", 0)


def marks(text: str) -> dict[str, str]:
    return {name: mark for mark, name in re.findall(r"^([✓✗·]) (.{15})", text, re.MULTILINE)}


def states(out: str) -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(out)["checks"]}


def test_a_machine_that_is_well_has_a_line_for_each_check_and_code_0(program):
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        code, out, err = program("doctor", "--expect", "8")
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
    assert (code, err) == (0, "")
    assert {name.strip(): mark for name, mark in marks(out).items()} == {
        **{"versions": "✓", "devices": "✓", "host memory": "✓", "disk for runs": "✓"},
        **{"disk for cache": "✓", "compile cache": "✓", "HF token": "·", "Google Cloud": "·"},
        **{"AWS": "·", "hub": "·", "data path": "✓"},
    }
    assert "✓ devices        8 CPUs\n" in out
    assert re.search(r"^all is well, in ", out, re.MULTILINE)


def test_another_number_of_devices_than_expected_is_a_cross_with_code_1(program, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    code, out, _ = program("doctor", "--expect", "16")
    assert code == 1 and "✗ devices        8 CPUs, and 16 expected\n" in out
    assert "`gcloud compute tpus tpu-vm list --zone=ZONE` lists the TPU VMs" in out
    assert "\n1 of 11 checks failed, in " in out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "CUDA_VISIBLE_DEVICES=0 in the environment may hide some" in (
        program("doctor", "--expect", "16").out
    )


def test_json_is_for_programs(program):
    code, out, _ = program("doctor", "--expect", "3", "--json")
    whole = json.loads(out)
    assert (code, whole["well"]) == (1, False)
    assert states(out)["devices"] == "wrong" and states(out)["versions"] == "well"
    assert set(whole["checks"][0]) == {"name", "state", "found", "advice"}


@pytest.mark.parametrize(
    "words, said",
    [
        (["--expect", "0"], "--expect is 0; it must be 1 or more"),
        (["--expect", "many"], '--expect is "many"; it must be a whole number'),
        (["--data", "nowhere"], "--data is nowhere, which is not there; name a file, a folder or"),
        (["--data", "https://a:b@host/x"], "--data in the command line is a URL with a user or a"),
        (["mine.yaml"], "mine.yaml is for a smoke test; windlass doctor --smoke mine.yaml makes"),
    ],
)
def test_what_cannot_be_is_refused(program, words, said):
    code, out, err = program("doctor", *words)
    assert code == 2 and out == "" and err.startswith(said), err


def test_credentials_are_present_and_never_shown(program, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key_of_mine")
    (tmp_path / "application_default_credentials.json").write_text("secret of mine")
    for words in ([], ["--json"]):
        _, out, err = program("doctor", *words)
        assert "of_mine" not in out + err and "of mine" not in out + err
    assert [states(out)[name] for name in ("HF token", "Google Cloud", "AWS")] == ["well"] * 3
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "nowhere.json")
    code, out, _ = program("doctor")
    assert code == 1 and "✗ Google Cloud   GOOGLE_APPLICATION_CREDENTIALS names a file that" in out


@pytest.fixture
def hub() -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(405)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_hub_is_well_when_it_answers_and_absent_when_it_does_not(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    assert access.network().state == "well"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    check = access.network()
    assert check.state == "absent" and "cannot be reached" in check.found
    assert "HF_HUB_OFFLINE=1" in (check.advice or "")


def test_the_speed_of_a_data_path_is_of_what_is_named(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    assert access.data_path(str(tmp_path / "rows")).state == "wrong"  # it is empty
    (tmp_path / "rows/a.jsonl").write_bytes(bytes(2**20))
    assert "(1.0 MiB read)" in access.data_path(str(tmp_path / "rows")).found
    fsspec.filesystem("memory").pipe("/rows/b.jsonl", bytes(2**21))
    assert "from memory://rows (2.0 MiB read)" in access.data_path("memory://rows").found
    assert "nope://x" in access.data_path("nope://x").found
    monkeypatch.setattr(access, "SLOWEST", 2**60)
    check = access.data_path(str(tmp_path / "rows"))
    assert check.state == "wrong" and "copy the data to a disk" in (check.advice or "")


def test_a_cross_says_what_to_do_about_versions_memory_disk_and_cache(program, monkeypatch):
    monkeypatch.setattr(machine, "LEAST_MEMORY", 2**60)
    monkeypatch.setattr(machine, "LEAST_DISK", 2**80)
    monkeypatch.setattr(compile_cache, "keep", lambda: Kept(None, "others may write to it"))
    monkeypatch.setattr(versions, "disagreements", lambda: iter([("libtpu", "libtpu is old")]))
    code, out, _ = program("doctor")
    assert code == 1
    crosses = [name.strip() for name, mark in marks(out).items() if mark == "✗"]
    memory = ["host memory", "disk for runs", "disk for cache", "compile cache"]
    assert crosses == ["versions", *memory]
    for advice in ("libtpu is old", "ps aux", "run.dir=FOLDER", "WINDLASS_CACHE=FOLDER", "others"):
        assert advice in out


@pytest.mark.parametrize(
    "how, said",
    [
        ("busy_tpu", "✗ devices        a TPU is here and does not answer: ABORTED: The TPU is al"),
        ("failing_cuda", "✗ devices        a GPU is here and does not answer: operation cuInit(0)"),
    ],
)
def test_a_device_that_is_here_and_does_not_work_is_a_cross(how, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = faked.run(how, "doctor", environ={"PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 1 and done.stderr == ""
    assert said in done.stdout and "no TPU or GPU is present" not in done.stdout
    assert ("gcloud compute tpus tpu-vm describe" in done.stdout) == (how == "busy_tpu")
    assert ("uses it: end it, or wait until it ends" in done.stdout) == (how == "busy_tpu")


def test_a_smoke_test_on_one_cpu_has_all_ticks(tmp_path):
    done = trained.windlass(tmp_path, "doctor", "--smoke", "--json")
    found = states(done.stdout)
    assert [found[stage] for stage in STAGES] == ["well"] * 6
    by_name = {check["name"]: check["found"] for check in json.loads(done.stdout)["checks"]}
    assert by_name["gradient sync"].startswith("2 simulated devices and one agree to ")
    assert by_name["resume"] == "from step 3, with the same losses as without the stop"
    assert list(tmp_path.iterdir()) == []  # nothing stays


def test_behind_a_stage_that_fails_none_is_tried(program, tmp_path):
    keys = ["data.source={kind: jsonl, path: nowhere.jsonl}", "device.count=1"]
    code, out, _ = program("doctor", "--smoke", "quickstart", *keys, "--json")
    found = states(out)
    assert code == 1 and [found[stage] for stage in STAGES] == ["well", "wrong", *["absent"] * 4]
    assert "nowhere.jsonl" in out


def test_devices_that_differ_are_a_cross(here, monkeypatch):
    test = smoke._Smoke("quickstart", [], None, here)  # type: ignore[arg-type]
    test.count, test.steps = 2, [{"loss": 2.0, "gradient_norm": 1.0}]
    monkeypatch.setattr(test, "train", lambda *_: [{"loss": 2.0, "gradient_norm": 1.01}])
    assert test.gradient_sync().state == "wrong"
    monkeypatch.setattr(test, "train", lambda *_: [{"loss": 2.0, "gradient_norm": 1.00001}])
    assert test.gradient_sync().state == "well"


def test_a_recipe_is_reduced_in_its_sizes_alone(here):
    written = smoke.reduced("quickstart", ["optim.learning_rate=1e-3"], Path("x"), 8)
    assert written["model"]["layers"] == 2 and written["model"]["family"] == "qwen3"
    assert written["train"]["batch"] == 16 and written["optim"]["learning_rate"] == 1e-3
    with pytest.raises(UserError, match="learns from another model"):
        smoke.reduced("distil-small", [], Path("x"), 1)


@pytest.mark.long
def test_a_smoke_test_of_a_recipe_on_several_devices_has_all_ticks(program, place):
    _, out, _ = program("doctor", "--smoke", "tiny.yaml", "device.count=2", "--json", cwd=place)
    assert [states(out)[stage] for stage in STAGES] == ["well"] * 6
