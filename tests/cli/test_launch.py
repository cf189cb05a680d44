"""`windlass launch` beside stand-ins for the programs that rent."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import trained
from tests.launch import standins
from windlass import api
from windlass.errors import UserError
from windlass.version import __version__

SPEC = "git+https://github.com/me/windlass@0123456"
ON = ("launch", "quickstart", "--on", "v6e-8", "--install", SPEC)
SPOT = (*ON, "--spot", "--bucket", "gs://mine")
BOUGHT = (*ON, "--bucket", "gs://mine", "--name", "mine")
LOST = (
    "`sky down NAME`, `sky jobs queue` and `sky jobs cancel`, `kubectl delete jobset,configmap "
    "NAME` and `gcloud compute tpus queued-resources delete NAME --zone=ZONE --force` delete "
    "what was launched elsewhere"
)
FOLDER = (
    "windlass is used from a folder of this computer, which no machine can install; --bucket "
    "gs://NAME uploads a wheel of it, or --install git+https://HOST/OWNER/windlass@COMMIT, "
    "--install with the URL of a wheel, or --install /bucket/FILE.whl for a wheel in the bucket "
    "would do\n"
)
CLONE = Path(__file__).parents[2]
WHEEL = f"windlass_lm-{__version__}-py3-none-any.whl"


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A folder with sky, kubectl and gcloud, which note how they are called; and no records yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = standins.recorder(tmp_path / "bin", "sky", "kubectl", "gcloud")
    monkeypatch.setenv("PATH", standins.path(folder, alone=True))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


def record(tmp_path: Path, name: str, suffix: str) -> str:
    return str(tmp_path / "config" / "windlass" / "launches" / name / f"{name}{suffix}")


def test_a_dry_run_prints_the_file_alone_and_on_the_other_stream_what_it_would_do(
    program, programs
):
    done = program(*SPOT, "--dry-run", "--name", "mine", "--zone", "us-east5-a")
    assert done.code == 0
    assert yaml.safe_load(done.out)["name"] == "mine"
    assert done.out == api.launch(
        "quickstart", on="v6e-8", spot=True, bucket="gs://mine", name="mine", zone="us-east5-a",
        install=SPEC, dry_run=True,
    )  # fmt: skip
    said = done.err.splitlines(keepends=True)
    (price,) = [line for line in said if line.startswith("price ")]
    assert re.fullmatch(r"price    \$[\d.]+ an hour on demand at .*; `windlass prices` .*\n", price)
    said.remove(price)
    assert "".join(said) == (
        "launch   mine on v6e-8 (8 chips, 1 host) by SkyPilot\n"
        "creates  a managed job mine: spot v6e-8 in us-east5-a, and a small machine that watches "
        "over it\n"
        "         after a preemption SkyPilot rents again and runs the same command, which goes "
        "on\n"
        "         deletes the machines when the training has ended\n"
        "runs     windlass train quickstart.yaml run.dir=/bucket/mine\n"
        "run      gs://mine/mine\n"
    )
    assert standins.calls(programs) == []


def test_a_launch_without_a_bucket_warns_and_keeps_the_machine(program, programs):
    done = program(*ON, "--on", "v6e-1", "--yes", "--name", "mine")
    assert done.code == 0
    assert "run      on the machine alone\n" in done.err
    assert (
        "without --bucket the run is lost with the machine, which is kept, and paid for, "
        "until windlass launch --delete mine\n"
    ) in done.err
    assert "--down" not in standins.calls(programs)[0]


def life(program: Callable, folder: Path, *words: str) -> list[list[str]]:
    """What a target's program is told in the life of a launch."""
    for command in (words, ("launch", "--status", "mine"), ("launch", "--stop", "mine")):
        done = program(*command, "--yes")
        assert done.code == 0, done.err
    assert done.err == "stopped; `windlass launch --delete mine` deletes what may be left of it\n"
    assert program("launch").out.startswith("mine  ")
    done = program("launch", "--delete", "mine", "--yes")
    assert (done.code, done.err) == (0, "deleted mine; the run is in gs://mine/mine\n")
    assert program("launch").out == (
        "nothing was launched yet; windlass launch RECIPE --on v6e-8 --dry-run shows how\n"
    )
    return standins.calls(folder)


def test_a_managed_job_is_launched_asked_after_and_cancelled(
    program, programs, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")  # which the stories do not need
    file = record(tmp_path, "mine", ".yaml")
    told = life(program, programs, *SPOT, "--name", "mine")
    job = told[0][4]
    assert re.fullmatch(r"mine-\d{10}", job)
    cancel = ["sky", "jobs", "cancel", "--name", job, "--yes"]
    assert told == [
        ["sky", "jobs", "launch", "--name", job, "--yes", "--detach-run", file],
        ["sky", "jobs", "queue"],
        cancel,
        cancel,
    ]


def test_a_job_that_is_launched_again_does_not_run_twice(program, programs, tmp_path):
    for _ in range(2):
        assert program(*SPOT, "--name", "mine", "--yes").code == 0
    first, cancelled, second = standins.calls(programs)
    assert [call[2] for call in (first, cancelled, second)] == ["launch", "cancel", "launch"]
    # SkyPilot cancels none where a name is that of two, and ends as if it had.
    assert first[4] == cancelled[4]
    standins.recorder(programs, "sky", code=3)
    noted = api.launches()
    assert program(*SPOT, "--name", "mine", "--yes").code == 3
    assert api.launches() == noted  # so that what could not be cancelled still can


def test_a_cluster_is_launched_asked_after_stopped_and_torn_down(program, programs, tmp_path):
    file = record(tmp_path, "mine", ".yaml")
    assert life(program, programs, *BOUGHT) == [
        ["sky", "launch", "--cluster", "mine", "--down", "--yes", "--detach-run", file],
        ["sky", "status", "mine"],
        ["sky", "queue", "mine"],
        ["sky", "cancel", "mine", "--all", "--yes"],
        ["sky", "down", "mine", "--yes"],
    ]


def test_a_job_set_is_applied_asked_after_suspended_and_deleted(program, programs, tmp_path):
    file = record(tmp_path, "mine", ".yaml")
    label = "jobset.sigs.k8s.io/jobset-name=mine"
    suspend = '{"spec": {"suspend": true}}'
    assert life(program, programs, *BOUGHT, "--to", "gke") == [
        [
            "kubectl",
            "--context",
            "here",
            "delete",
            "jobset",
            "mine",
            "--ignore-not-found",
            "--cascade=foreground",
        ],
        ["kubectl", "--context", "here", "apply", "--filename", file],
        ["kubectl", "--context", "here", "get", "jobset", "mine"],
        ["kubectl", "--context", "here", "get", "pods", "--selector", label, "--output", "wide"],
        [
            "kubectl",
            "--context",
            "here",
            "patch",
            "jobset",
            "mine",
            "--type",
            "merge",
            "--patch",
            suspend,
        ],
        ["kubectl", "--context", "here", "delete", "--ignore-not-found", "--filename", file],
    ]


def test_a_script_is_run_and_its_other_verbs_too(program, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, value in standins.cloud(tmp_path / "cloud", "exit 0\n").items():
        monkeypatch.setenv(name, value)
    for words in (
        (*BOUGHT, "--to", "tpu-vm", "--yes"),
        ("launch", "--status", "mine"),
        ("launch", "--delete", "mine", "--yes"),
    ):
        assert program(*words).code == 0
    log = (tmp_path / "cloud" / "log").read_text().splitlines()
    assert [line.split()[3] for line in log] == ["create", "delete"]


def test_a_token_of_the_hub_is_named_and_never_written(program, programs, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = "data.source={kind: hub, name: me/mine}"
    done = program(*SPOT, "--yes", "--name", "mine", source, "data.length=64")
    assert done.code == 0, done.err
    (call,) = standins.calls(programs)
    assert call[-3:-1] == ["--secret", "HF_TOKEN"]
    written = [path.read_text() for path in (tmp_path / "config").rglob("*.*") if path.is_file()]
    assert "hf_secret" not in str([*written, done, call])


def test_a_file_is_saved_and_one_that_holds_something_else_left_alone(program, programs, tmp_path):
    words = (*BOUGHT, "--to", "tpu-vm", "--dry-run", "--save", "mine.sh")
    done = program(*words)
    assert (done.code, (tmp_path / "mine.sh").read_text()) == (0, done.out)
    assert done.err.endswith("written to mine.sh\n")
    assert program(*words).code == 0
    (tmp_path / "mine.sh").write_text("precious")
    refused = program(*words)
    assert refused.code == 2
    assert refused.err.endswith("--save is mine.sh, which is there and holds something else\n")


@pytest.mark.parametrize(
    ("to", "program_name", "how"),
    [
        ("skypilot", "sky", "pip install 'windlass-lm[cloud]', then `sky check gcp`"),
        (
            "gke",
            "kubectl",
            "https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl",
        ),
        ("tpu-vm", "gcloud", "https://cloud.google.com/sdk/docs/install"),
    ],
)
def test_a_program_that_is_not_here_is_named_with_how_to_get_it(
    to, program_name, how, program, programs
):
    (programs / program_name).unlink()
    refused = program(*BOUGHT, "--to", to, "--yes")
    assert refused.code == 2
    assert refused.err.endswith(
        f"\n{program_name} is not on this machine, and rents there ({how}); --dry-run needs "
        "nothing, and prints the file\n"
    )


def test_what_fails_is_said_with_how_to_delete_what_there_is(program, programs):
    standins.recorder(programs, "sky", code=3)
    failed = program(*BOUGHT, "--yes")
    assert failed.code == 3
    assert failed.err.endswith(
        "this failed; `windlass launch --delete mine` deletes what there is\n"
    )
    # What could not be deleted is not forgotten.
    assert program("launch", "--delete", "mine", "--yes").code == 3
    assert program("launch").out.startswith("mine  v6e-8  SkyPilot  gs://mine/mine  ")
    with pytest.raises(UserError, match="^sky ended with 3; `windlass launch --delete mine` "):
        api.launch("quickstart", on="v6e-8", bucket="gs://mine", name="mine", install=SPEC)
    assert list(api.launches()) == ["mine"]


REFUSED = {
    ("launch", "quickstart"): "on which slice? --on v6e-8, for one; --on 2xv6e-16 is two slices",
    BOUGHT: "this needs a confirmation, and this is no terminal; --yes skips it",
    ("launch", "--status", "mine"): (
        f"no launch is called mine; nothing was launched from here. {LOST}"
    ),
    ("launch", "--dry-run", "--delete", "mine"): (
        "one thing at a time: --dry-run and --delete mine are given"
    ),
    ("launch", "quickstart", "--stop", "mine"): (
        "one thing at a time: quickstart and --stop mine are given"
    ),
    ("launch", "--status", "mine", "--delete", "yours"): (
        "one thing at a time: --status mine and --delete yours are given"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED.items(), ids=lambda one: str(one)[:30])
def test_what_is_refused(words, message, program, programs):
    refused = program(*words)
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == message
    assert standins.calls(programs) == []


@pytest.mark.parametrize(
    ("first", "then", "was"),
    [
        ((), ("--to", "gke"), "on v6e-8, by skypilot"),
        ((), ("--on", "v6e-1"), "on v6e-8"),
        (("--spot",), (), "on v6e-8, with --spot"),
        (("--zone", "us-east5-a"), (), "on v6e-8, in us-east5-a"),
        ((), ("--bucket", "gs://mine/other"), "on v6e-8, for gs://mine/mine"),
    ],
)
def test_a_name_is_not_launched_twice_to_different_places(first, then, was, program, programs):
    assert program(*BOUGHT, "--yes", *first).code == 0
    refused = program(*BOUGHT, "--yes", *then)
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == (
        f"mine was launched {was}, and may still be there; `windlass launch --delete "
        "mine` first, after which it goes on here, or give another --name"
    )


@pytest.mark.parametrize(("to", "program_name"), [("gke", "kubectl"), ("tpu-vm", "gcloud")])
def test_what_was_rented_is_deleted_where_it_was_rented(
    to, program_name, program, programs, monkeypatch
):
    monkeypatch.setenv("POLL_SECONDS", "0.1")
    assert program(*BOUGHT, "--to", to, "--yes").code in (0, 1)
    standins.recorder(programs, program_name, where="elsewhere")
    refused = program(*BOUGHT, "--to", to, "--yes")
    assert refused.code == 2 and "mine was launched on v6e-8, in here, and may" in refused.err
    assert api.launches()["mine"].where == "here"
    standins.recorder(programs, program_name, where="")
    refused = program(*BOUGHT, "--to", to, "--yes", "--name", "other")
    assert refused.err.splitlines()[-1].startswith(f"{program_name} has no ")


def test_an_unknown_launch_is_refused_with_the_nearest(program, programs):
    assert program(*BOUGHT, "--yes").code == 0
    unknown = program("launch", "--status", "mina")
    assert unknown.err == f"no launch is called mina; did you mean mine? there is mine. {LOST}\n"


def test_a_record_that_cannot_be_read_is_named(program, programs, tmp_path):
    assert program(*BOUGHT, "--yes").code == 0
    path = tmp_path / "config" / "windlass" / "launches" / "mine" / "launch.json"
    path.write_text("{")
    refused = program("launch")
    assert refused.code == 2
    assert refused.err == (
        f"{path} is no record of a launch; what mine rented may still be there. {LOST}; then "
        "delete that folder\n"
    )


def test_a_folder_of_this_computer_is_not_what_machines_install(program, programs, monkeypatch):
    monkeypatch.setattr("windlass.launch.installing._distribution", lambda: None)
    words = ("launch", "quickstart", "--on", "v6e-8")
    done = program(*words, "--dry-run")
    assert done.code == 0
    assert "'windlass-lm[tpu] @ https://windlass.invalid/say-what-with--install'" in done.out
    assert done.err.endswith(f"\nNOT TO BE RUN AS IT IS: {FOLDER}")
    refused = program(*words, "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.endswith(f"\n{FOLDER}")
    assert standins.calls(programs) == []
    assert program("launch").out.startswith("nothing was launched yet")


@pytest.mark.long
def test_a_clone_is_built_and_uploaded_for_the_machines_to_install(program, programs, monkeypatch):
    monkeypatch.setattr("windlass.launch.installing._distribution", lambda: None)
    words = ("launch", "quickstart", "--on", "v6e-8", "--bucket", "gs://mine/runs")
    dry = program(*words, "--dry-run", "--name", "mine")
    assert dry.code == 0 and standins.calls(programs) == []
    (where,) = set(re.findall(rf"file:///bucket/runs/uploads/([0-9a-f]{{12}})/{WHEEL}", dry.out))
    said = rf"\nuploads  a wheel of {CLONE}, \d\.\d MiB, to gs://mine/runs/uploads/{where}\n"
    assert re.search(said, dry.err)
    assert dry.err.endswith(
        "\nnothing was uploaded; the same without --dry-run uploads before it rents\n"
    )
    assert program(*words, "--yes", "--name", "mine").code == 0
    upload, rent = standins.calls(programs)
    copy = ["gcloud", "storage", "cp", "--recursive", "--no-clobber"]
    assert upload[:5] == copy and upload[5].endswith(f"/{WHEEL}")
    assert upload[6] == f"gs://mine/runs/uploads/{where}/"
    assert rent[:2] == ["sky", "launch"]


def test_files_that_a_recipe_names_are_uploaded_after_saying_how_much(program, programs, tmp_path):
    trained.write_corpus(tmp_path / "rows.jsonl", 60)
    keys = ["data.source={kind: jsonl, path: rows.jsonl}", "data.length=64", "data.validation=0"]
    done = program(*BOUGHT, *keys, "--yes")
    assert done.code == 0, done.err
    upload, rent = standins.calls(programs)
    assert upload[5] == str(tmp_path / "rows.jsonl")
    where = upload[6].removeprefix("gs://mine/uploads/")
    assert f"\nuploads  {tmp_path}/rows.jsonl, " in done.err
    assert f" KiB, to gs://mine/uploads/{where.rstrip('/')}\n" in done.err
    task = yaml.safe_load(Path(record(tmp_path, "mine", ".yaml")).read_text())
    assert task["run"].endswith(f"data.source.path=/bucket/uploads/{where}rows.jsonl\n")
    assert program(*BOUGHT, *keys, "--yes").code == 0
    assert standins.calls(programs)[2] == upload  # to where it is already, which gcloud sees
    # What cannot be uploaded is not rented for.
    standins.recorder(programs, "gcloud", code=4)
    refused = program(*BOUGHT, *keys, "--yes")
    assert (refused.code, refused.err.splitlines()[-1]) == (
        2,
        f"{tmp_path}/rows.jsonl could not be uploaded to gs://mine/uploads/{where.rstrip('/')}: "
        "gcloud ended with 4; nothing was rented",
    )
    assert standins.calls(programs)[-1] == upload
    (programs / "gcloud").unlink()
    refused = program(*BOUGHT, *keys, "--yes")
    assert refused.err.splitlines()[-1] == (
        "gcloud is not on this machine, and uploads to gs://mine "
        "(https://cloud.google.com/sdk/docs/install); --dry-run needs nothing, and prints the file"
    )


def test_slices_for_which_skypilot_would_wait_for_ever_are_not_rented_by_it(program, programs):
    words = (*BOUGHT, "--on", "2xv6e-16", "train.batch=64")
    why = (
        "SkyPilot counts the hosts of 2xv6e-16 once for every slice, and would wait for more of "
        "them than there are while these cost; --to tpu-vm rents them, as does --to gke\n"
    )
    assert program(*words, "--dry-run").err.endswith(f"\nNOT TO BE RUN AS IT IS: {why}")
    refused = program(*words, "--yes")
    assert (refused.code, standins.calls(programs)) == (2, [])
    assert refused.err.endswith(f"\n{why}")
    assert program(*words, "--on", "2xv6e-8", "--yes").code == 0  # of one host each


def test_an_unknown_slice_is_refused_with_the_nearest(program, programs):
    refused = program("launch", "quickstart", "--on", "v6e-7", "--dry-run")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        'there is no TPU slice "v6e-7"; the nearest are v6e-4 and v6e-8. The number counts chips, '
        "and v6e comes as v6e-1, v6e-4, v6e-8, v6e-16, v6e-32, v6e-64, v6e-128 and v6e-256\n"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "run.dir=gs://mine/runs",
            "run.dir  is gs://mine/runs; a run is a folder of files: mount the bucket, with "
            "gcsfuse --implicit-dirs --rename-dir-limit=200000, and name the folder there; "
            "`windlass launch --bucket` does both",
        ),
        (
            "data.cache=gs://mine/cache",
            "data.cache  is gs://mine/cache; it is a folder: that of a mounted bucket would do",
        ),
    ],
)
def test_a_folder_is_no_url(key, said, program, tmp_path):
    refused = program("train", "quickstart", key)
    assert refused.code == 2
    assert refused.err == f"1 problem in quickstart and the command line:\n  {said}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_slice_that_help_names_exists():
    from windlass.cli.launch import launch
    from windlass.devices import slices
    from windlass.launch import gpus

    for name in re.findall(r"--on (\S+)", launch.__doc__ or ""):
        assert gpus.find(name) or slices.find(name)
