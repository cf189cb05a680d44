"""What is refused before anything is rented, and what a launch is called."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import trained
from windlass.config import Written, load, words
from windlass.errors import UserError
from windlass.launch.description import Bucket
from windlass.launch.preparing import prepare

BUCKET = "gs://mine/runs"


def recipe(**sections) -> dict:
    """A small recipe that any machine can run."""
    stories = {"data": {"source": {"kind": "stories"}, "length": 90}, "device": {"kind": "auto"}}
    found = trained.recipe() | stories | sections
    return {key: value for key, value in found.items() if key != "by_device"}


def refusal(*overrides: str, on: str = "v6e-8", of: dict | None = None, **how) -> str:
    with pytest.raises(UserError) as refused:
        prepare(of or recipe(), overrides, on=on, **how)
    return str(refused.value)


def test_a_spot_machine_without_a_bucket_is_refused():
    assert refusal(spot=True) == (
        "--spot needs --bucket gs://NAME: a spot machine is taken away at any time with all that "
        "is on it, and from the bucket the run goes on"
    )


def test_several_hosts_without_a_bucket_are_refused():
    assert refusal(on="2xv6e-16") == (
        "2xv6e-16 has 8 hosts, which need --bucket gs://NAME: each saves its part of a checkpoint "
        "in one folder that all of them see"
    )


def test_a_zone_or_region_without_the_chip_is_refused_with_those_that_have_it():
    assert refusal(zone="us-central2-b") == (
        "--zone is us-central2-b, which has no v6e for everybody; v6e-8 is in us-central1-b, "
        "us-east1-d, us-east5-a, us-east5-b, europe-west4-a and asia-northeast1-b"
    )
    assert refusal(on="v5p-8", region="us-west4") == (
        "--region is us-west4, which has no v5p for everybody; v5p-8 is in us-central1, us-east5 "
        "and europe-west4"
    )
    assert refusal(zone="us-east5-a", region="us-east5") == (
        "--zone is us-east5-a, and --region is us-east5; leave one of them out"
    )


@pytest.mark.parametrize(
    "bucket", ["mine", "s3://mine", "gs://Mine", "gs://mine/../yours", "gs://"]
)
def test_what_is_no_bucket_is_refused(bucket):
    assert refusal(bucket=bucket) == (
        f"--bucket is {bucket}; it must be gs://NAME or gs://NAME/PATH, in letters, digits, dots, "
        "underscores and hyphens"
    )


def test_a_bucket_is_seen_under_one_folder():
    bucket = Bucket.read("gs://my.bucket-1/a/b_c/")
    assert (bucket.name, bucket.path, bucket.folder) == ("my.bucket-1", "a/b_c", "/bucket/a/b_c")
    assert str(bucket) == "gs://my.bucket-1/a/b_c"
    assert (Bucket.read("gs://mine").folder, str(Bucket.read("gs://mine"))) == (
        "/bucket",
        "gs://mine",
    )


def test_files_that_are_nowhere_are_refused_all_at_once_with_what_would_do():
    here = recipe(
        data={"mixture": [{"kind": "jsonl", "path": "a.jsonl"}, {"kind": "stories"}], "length": 90},
        tokenizer={"kind": "file", "path": "tokenizer.json"},
        model={"path": "gs://mine/model"},
        adapter={"kind": "lora", "path": "~/adapter"},
        objective={"kind": "distil", "teacher": {"run": "runs/large"}},
    )
    under = "a path under /bucket/runs, where --bucket is mounted"
    assert refusal(of=here, bucket=BUCKET) == (
        "5 problems in the recipe:\n"
        "  model.path             is gs://mine/model, which cannot be read as a URL; "
        f"{under} or model.hub=OWNER/NAME would do\n"
        f"  adapter.path           is ~/adapter, which is not on this computer; {under} would do\n"
        "  tokenizer.path         is tokenizer.json, which is not on this computer; "
        f"{under} or tokenizer.hub=OWNER/NAME would do\n"
        "  data.mixture.0.path    is a.jsonl, which is not on this computer; "
        f"{under}, a URL such as gs://NAME/rows.jsonl or a data set of the hub would do\n"
        "  objective.teacher.run  is runs/large, which is not on this computer; "
        f"{under} or objective.teacher.hub=OWNER/NAME would do"
    )


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder, where one is, with two files of rows and the folder of a model."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * 100)
    return tmp_path


def test_files_folders_and_patterns_of_this_computer_are_uploaded(files):
    sources = [{"kind": "jsonl", "path": "*.jsonl"}, {"kind": "jsonl", "path": "a.jsonl"}]
    here = recipe(data={"mixture": sources, "length": 90}, model={"path": "model"})
    launch = prepare(here, on="v6e-8", bucket=BUCKET, install="windlass-lm")
    found = {upload.name: upload for upload in launch.uploads}
    assert {name: one.size_bytes for name, one in found.items()} == {
        "*.jsonl": 200,
        "a.jsonl": 100,
        "model": 100,
    }
    assert found["model"].source == files / "model"
    for key, name in {
        "model.path": "model",
        "data.mixture.0.path": "*.jsonl",
        "data.mixture.1.path": "a.jsonl",
    }.items():
        there = found[name].path
        assert re.fullmatch(rf"/bucket/runs/uploads/[0-9a-f]{{12}}/{re.escape(name)}", there)
        (word,) = [word for word in launch.keys if word.startswith(f"{key}=")]
        assert load({}, [word]).command_line == load({}, words({key: there})).command_line


@pytest.mark.parametrize("short", [False, True])
def test_the_cache_of_a_teacher_is_uploaded(files, short):
    (files / "cache").mkdir()
    (files / "cache/rows.npy").write_text("x" * 30)
    path, model = "cache", {"run": "runs/large"}  # which only `windlass teach` reads
    teacher = path if short else {"path": path, "model": model}
    data = {"source": {"kind": "stories"}, "length": 90, "teacher": teacher}
    distilled = recipe(data=data, objective="distil")
    launch = prepare(distilled, on="v6e-8", bucket=BUCKET, install="windlass-lm")
    (upload,) = launch.uploads
    assert (upload.name, upload.size_bytes) == ("cache", 30)
    assert f"data.teacher.path={upload.path}" in launch.keys
    shutil.rmtree(files / "cache")
    assert refusal(of=distilled, bucket=BUCKET) == (
        "1 problem in the recipe:\n"
        "  data.teacher.path  is cache, which is not on this computer; `windlass teach`, which "
        "writes it or a path under /bucket/runs, where --bucket is mounted would do"
    )


def test_a_link_to_a_file_is_uploaded_by_its_own_name(files):
    (files / "blob").write_text("x" * 70)
    (files / "rows.jsonl.gz").symlink_to("blob")  # as a cache of the hub has its files
    data = {"source": {"kind": "jsonl", "path": "rows.jsonl.gz"}, "length": 90}
    how: dict[str, Any] = {"on": "v6e-8", "bucket": BUCKET, "install": "windlass-lm"}
    (upload,) = prepare(recipe(data=data), **how).uploads
    assert (upload.name, upload.size_bytes) == ("rows.jsonl.gz", 70)


def test_what_changed_is_uploaded_to_another_place(files):
    data = {"source": {"kind": "jsonl", "path": "a.jsonl"}, "length": 90}
    how: dict[str, Any] = {"on": "v6e-8", "bucket": BUCKET, "install": "windlass-lm"}
    first, again = (prepare(recipe(data=data), **how).uploads for _ in range(2))
    (files / "a.jsonl").write_text("other")
    assert first == again != prepare(recipe(data=data), **how).uploads


def test_an_empty_path_is_not_the_folder_that_one_is_in(files):
    data = {"source": {"kind": "jsonl", "path": ""}, "length": 90}
    said = refusal(of=recipe(data=data), bucket=BUCKET)
    assert "data.source.path  is , which is not on this computer; a path under" in said


@pytest.mark.parametrize("path", ["a.jsonl", "*.jsonl"])
def test_files_of_this_computer_without_a_bucket_are_refused_with_what_to_do(files, path):
    data = {"source": {"kind": "jsonl", "path": path}, "length": 90}
    assert refusal(of=recipe(data=data)) == (
        "1 problem in the recipe:\n"
        f"  data.source.path  is {path}, which is on this computer; --bucket gs://NAME, which it "
        "is uploaded to, a path under /bucket, where --bucket is mounted, a URL such as "
        "gs://NAME/rows.jsonl or a data set of the hub would do"
    )


def test_files_in_the_bucket_and_at_urls_are_left_to_the_machines():
    data = {"source": {"kind": "jsonl", "path": "gs://mine/rows/*.jsonl"}, "length": 90}
    model = {"path": "/bucket/models/mine"}
    mine = recipe(data=data, model=model)
    launch = prepare(mine, on="v6e-8", bucket=BUCKET, install="windlass-lm")
    assert launch.packages == ("windlass-lm[tpu]", "gcsfs")
    objective = {"kind": "distil", "teacher": {"path": "/bucket/models/large"}}
    assert prepare(
        recipe(objective=objective), on="v6e-8", bucket=BUCKET, install="windlass-lm"
    ).packages
    launch = prepare(recipe(), on="v6e-8", bucket=BUCKET, install="windlass-lm")
    assert launch.packages == ("windlass-lm[tpu]",)
    assert refusal(of=recipe(model=model)) == (
        "1 problem in the recipe:\n"
        "  model.path  is /bucket/models/mine, and there is no --bucket that would be mounted there"
    )


def test_keys_are_checked_even_where_the_model_is_in_the_bucket():
    said = refusal("train.btach=8", of=recipe(model={"path": "/bucket/mine"}), bucket=BUCKET)
    assert said == (
        "1 problem in the recipe and the command line:\n  train.btach  unknown; did you mean batch?"
    )


def test_a_run_folder_outside_the_bucket_is_refused():
    assert refusal("run.dir=runs/mine", bucket=BUCKET) == (
        "1 problem in the recipe and the command line:\n"
        "  run.dir  is runs/mine, which is not in the bucket; leave it out, or take a folder under "
        "/bucket/runs, where the bucket is mounted"
    )
    for outside in ("/bucket/../../etc", "/bucket/..", "/bucket", "/buckets", "/bucket/a/../.."):
        assert f"run.dir  is {outside}, which is not in the bucket;" in refusal(
            f"run.dir={outside}", bucket=BUCKET
        )
    launch = prepare(recipe(), ["run.dir=/bucket/other"], on="v6e-8", bucket=BUCKET)
    assert launch.keys == ("run.dir=/bucket/other",)


def test_a_batch_that_the_slice_cannot_divide_is_refused_before_it_is_rented():
    said = refusal("train.batch=12", on="v6e-8", bucket=BUCKET)
    assert said.startswith("1 problem in the recipe and the command line:\n  ")
    assert "12" in said and "8" in said
    assert prepare(recipe(), ["train.batch=12"], on="v5p-8").slices.devices == 4


def test_matrices_are_not_split_between_slices():
    said = refusal("mesh.tensor=2", on="2xv6e-1", bucket=BUCKET)
    assert "mesh" in said and "on 2 slices, whose network is too slow" in said


def test_a_recipe_for_another_kind_of_device_is_refused():
    assert refusal("device=gpu", bucket=BUCKET) == (
        "device.kind is gpu, and no GPU is present, only 8 TPUs (TPU v6 lite); device=tpu or "
        "device=auto would run here, and device.fallback=true goes on with the best there is"
    )


def test_the_keys_for_tpus_are_those_that_are_checked():
    special = recipe(by_device={"tpu": {"train.batch": 20}})
    special["by_device"] = {"tpu": {"train.batch": 20}}
    assert "20" in refusal(of=special, bucket=BUCKET)


@pytest.mark.parametrize("name", ["Mine", "8mine", "mine-", "my_run", "a" * 41])
def test_a_name_that_no_machine_can_have_is_refused(name):
    assert refusal(name=name) == (
        f"--name is {name}; it must be at most 40 small letters, digits and hyphens, and begin "
        "with a letter: machines are called so"
    )


def test_a_launch_is_called_as_its_run_would_be_and_by_the_same_name_again():
    small = recipe()
    first, again = (prepare(small, on="v6e-8", bucket=BUCKET) for _ in range(2))
    other = prepare(small, ["train.seed=1"], on="v6e-8", bucket=BUCKET)
    assert first.name == again.name != other.name
    assert first.run == f"gs://mine/runs/{first.name}"
    # Neither the slice nor the length of a run makes it another one.
    longer = prepare(small, ["train.steps=9"], on="v5e-8", bucket=BUCKET)
    assert longer.name == first.name


def test_a_recipe_of_any_name_becomes_a_file_and_machines_that_can_be_called_so():
    text = yaml.safe_dump(recipe())
    for name in ("Mein Rezept ä (2)", "2x$(date)", "a" * 80, "..", "--help"):
        launch = prepare(Written(name, text), on="v6e-8", bucket=BUCKET)
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.yaml", launch.file)
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", launch.name)


def test_without_a_bucket_the_machine_is_kept():
    assert prepare(recipe(), on="v6e-8").is_kept
    assert not prepare(recipe(), on="v6e-8", bucket=BUCKET).is_kept


@pytest.mark.parametrize("path", ["/bucket/../etc/rows.jsonl", "/bucket/../../rows.jsonl"])
def test_data_outside_of_the_bucket_is_not_on_the_machines(path):
    assert f"data.source.path  is {path}, which is not on this computer;" in refusal(
        *("data.source.kind=jsonl", f"data.source.path={path}"), bucket=BUCKET
    )
