"""The files of all three targets, for the slices that are most asked for."""

import dataclasses
import functools
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.launch.standins import executable
from windlass.config import Written, load
from windlass.devices import slices
from windlass.errors import UserError
from windlass.launch import TARGETS, find
from windlass.launch.description import Launch
from windlass.launch.preparing import prepare

HERE = Path(__file__).parent
NAMES = ("v5e-8", "v6e-1", "v6e-8", "v5p-8", "2xv6e-16")
ACCELERATORS = {
    "v5e-8": ("tpu-v5litepod-8", "v2-alpha-tpuv5-lite"),
    "v6e-1": ("tpu-v6e-1", "v2-alpha-tpuv6e"),
    "v6e-8": ("tpu-v6e-8", "v2-alpha-tpuv6e"),
    "v5p-8": ("tpu-v5p-8", "v2-alpha-tpuv5"),
    "2xv6e-16": ("tpu-v6e-16", "v2-alpha-tpuv6e"),
}
BATCH = ["train.batch=64"]
INSTALL = "git+https://github.com/me/windlass@0123456"


def launch(name: str, **how) -> Launch:
    how = {"spot": True, "bucket": "gs://mine/runs", "install": INSTALL} | how
    return prepare("quickstart", BATCH, on=name, **how)


@pytest.fixture(scope="module")
def launches() -> dict[str, Launch]:
    return {name: launch(name) for name in NAMES}


@functools.cache
def schema(name: str) -> dict:
    return yaml.safe_load((HERE / f"{name}.schema.yaml").read_text())


def parts(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", NAMES)
def test_the_task_is_one_that_skypilot_accepts_and_the_catalogue_knows(name, launches):
    (task,) = parts(find("skypilot").write(launches[name]))
    jsonschema.validate(task, schema("skypilot"))
    resources = task["resources"]
    accelerator, runtime = ACCELERATORS[name]
    assert (resources["accelerators"], resources["accelerator_args"]["runtime_version"]) == (
        accelerator,
        runtime,
    )
    known = slices.find(accelerator)
    assert task["num_nodes"] == (2 if name == "2xv6e-16" else 1)
    assert known.each == launches[name].slices.each
    places = [one["infra"] for one in resources["any_of"]]
    assert [place.split("/")[2] for place in places] == list(known.each.zones)


def test_a_slice_that_skypilot_would_take_and_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match='there is no TPU slice "tpu-v6e-7"; the nearest are v6e-4'):
        launch("tpu-v6e-7")


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_is_a_job_set_of_a_pod_a_host(name, launches):
    recipe, job_set = parts(find("gke").write(launches[name]))
    jsonschema.validate(job_set, schema("jobset"))
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    asked = slices.find(name)
    assert replicated["replicas"] == asked.count
    assert job["parallelism"] == job["completions"] == asked.each.hosts
    assert replicated["replicas"] * job["completions"] * chips == asked.chips
    selector = pod["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == asked.each.topology
    assert selector["cloud.google.com/gke-tpu-accelerator"] == {
        "v5e": "tpu-v5-lite-podslice",
        "v5p": "tpu-v5p-slice",
        "v6e": "tpu-v6e-slice",
    }.get(asked.each.generation)
    assert recipe["kind"] == "ConfigMap"
    assert recipe["data"] == {"quickstart.yaml": launches[name].recipe.text}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/bucket"]]["csi"]["volumeAttributes"]["bucketName"] == "mine"
    assert volumes[mounts["/recipe"]]["configMap"]["name"] == recipe["metadata"]["name"]


def test_a_field_that_a_job_set_does_not_have_is_found(launches):
    _, job_set = parts(find("gke").write(launches["v6e-8"]))
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["retries"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job_set, schema("jobset"))


@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_one_that_a_shell_reads(name, launches, tmp_path):
    script = tmp_path / "launch.sh"
    script.write_text(find("tpu-vm").write(launches[name]))
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    checked = subprocess.run([*checker, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_every_host_runs_the_same_command_which_names_the_folder_in_the_bucket(name, to, launches):
    one = launches[name]
    text = find(to).write(one)
    command = shlex.join(one.train)
    assert one.packages == (f"windlass-lm[tpu] @ {INSTALL}",)
    assert text.count(command) == 1
    assert f"run.dir=/bucket/runs/{one.name}" in one.keys
    # The tokens are prepared once, and all hosts find them.
    assert ("data.cache=/bucket/runs/cache" in one.keys) == (one.slices.hosts > 1)
    assert load(one.recipe, one.keys).merged("tpu")["train"]["batch"] == 64


@pytest.mark.parametrize("to", TARGETS)
def test_no_token_of_the_user_is_in_a_file(to, launches, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in find(to).write(launches["v6e-8"])


def test_slices_are_told_of_each_other_where_skypilot_does_not(tmp_path):
    """SkyPilot 0.14.1 lists the first host of one slice, and then all others slice by slice."""
    count = 4
    run = parts(find("skypilot").write(launch("4xv6e-16")))[0]["run"]
    show = 'echo "$MEGASCALE_NUM_SLICES $MEGASCALE_SLICE_ID $MEGASCALE_COORDINATOR_ADDRESS"'
    lines = run.partition("export PATH")[0]
    executable(tmp_path / "curl", '#!/bin/sh\necho "$ENDPOINTS"\n')
    hosts = {slice: [f"10.0.{slice}.{host}" for host in range(4)] for slice in range(count)}
    path = f"{tmp_path}:/usr/bin:/bin"
    for head in range(count):
        rest = [ip for slice in hosts for ip in hosts[slice] if ip != hosts[head][0]]
        listed = "\n".join([hosts[head][0], *rest])
        told = []
        for number, ips in hosts.items():
            endpoints = [ips[0], *ips[1:]] if number else [f"unknown:unknown:{ip}" for ip in ips]
            environment = {"SKYPILOT_NODE_IPS": listed, "ENDPOINTS": ",".join(endpoints)}
            done = subprocess.run(
                ["bash", "-c", f"{lines}\n{show}"], env=environment | {"PATH": path},
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            told.append(done.stdout.split())
        assert {(slices, first) for slices, _, first in told} == {("4", hosts[head][0])}
        numbers = [int(number) for _, number, _ in told]
        assert sorted(numbers) == [0, 1, 2, 3] and numbers[head] == 0
    assert "MEGASCALE" not in parts(find("skypilot").write(launch("v6e-8")))[0]["run"]


def test_a_host_that_is_in_no_list_does_not_train_alone(tmp_path):
    run = parts(find("skypilot").write(launch("2xv6e-16")))[0]["run"]
    executable(tmp_path / "curl", "#!/bin/sh\necho 10.9.9.9\n")
    environment = {"SKYPILOT_NODE_IPS": "10.0.0.1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    lines = run.partition("export PATH")[0]
    assert subprocess.run(["bash", "-c", f"{lines}\nexit 0"], env=environment).returncode == 1


def test_machines_that_are_not_spot_are_neither_asked_for_nor_tolerated_as_such(launches):
    bought, lent = launch("v6e-8", spot=False), launches["v6e-8"]
    for one in (bought, lent):
        (task,) = parts(find("skypilot").write(one))
        assert task["resources"]["use_spot"] == ("job_recovery" in task["resources"]) == one.is_spot
        assert ("gke-spot" in find("gke").write(one)) == one.is_spot
        assert ("--spot" in find("tpu-vm").write(one)) == one.is_spot


def test_a_zone_or_a_region_narrows_where_the_machines_are():
    here = launch("v6e-8", zone="us-east5-b")
    (task,) = parts(find("skypilot").write(here))
    assert task["resources"]["infra"] == "gcp/us-east5/us-east5-b"
    assert "ZONE=us-east5-b\n" in find("tpu-vm").write(here)
    assert "topology.kubernetes.io/zone: us-east5-b" in find("gke").write(here)
    there = launch("v6e-8", region="us-east5")
    (task,) = parts(find("skypilot").write(there))
    jsonschema.validate(task, schema("skypilot"))
    assert [one["infra"] for one in task["resources"]["any_of"]] == [
        "gcp/us-east5/us-east5-a",
        "gcp/us-east5/us-east5-b",
    ]
    assert "topology.kubernetes.io/region: us-east5" in find("gke").write(there)


REFUSED = {
    ("gke", "v2-8", "gs://mine"): "GKE has no v2-8; --to skypilot and --to tpu-vm rent it",
    (
        "gke",
        "2xv6e-8",
        "gs://mine",
    ): "GKE joins slices of several hosts, and v6e-8 is one host; --to tpu-vm joins these, or "
    "take one larger slice",
    (
        "gke",
        "v6e-8",
        None,
    ): "--to gke needs --bucket gs://NAME: of what a pod writes nothing is left when it ends",
    (
        "skypilot",
        "7x-8",
        "gs://mine",
    ): "SkyPilot has no 7x-8, which is rented through GKE: --to gke",
    (
        "tpu-vm",
        "7x-8",
        "gs://mine",
    ): "Cloud TPU does not rent 7x-8 as a TPU VM; --to gke rents it",
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.items(), ids=lambda one: str(one)[:24])
def test_a_target_refuses_what_it_does_not_have(asked, message):
    to, name, bucket = asked
    with pytest.raises(UserError) as refused:
        find(to).check(launch(name, bucket=bucket, spot=False))
    assert str(refused.value) == message


def test_machines_that_cannot_be_kept_are_not_promised_to_be():
    for to, said in (
        ("gke", "--keep is given, and on GKE the nodes are the cluster's: leave it out"),
        (
            "skypilot",
            "--keep is given, and a managed job, which --spot makes, always deletes its machines; "
            "leave one of them out",
        ),
    ):
        with pytest.raises(UserError) as refused:
            find(to).check(launch("v6e-8", keep=True))
        assert str(refused.value) == said


def test_a_target_that_does_not_exist_is_refused():
    with pytest.raises(UserError) as refused:
        find("gki")
    assert str(refused.value) == (
        'there is no target "gki"; did you mean gke? there are skypilot, gke and tpu-vm'
    )


def test_a_text_that_holds_the_end_of_a_heredoc_arrives_whole(tmp_path):
    from windlass.launch import shell

    text = "a: 1\nEND\nb: '$HOME' `date`\nEND_\n"
    script = shell.write_file("recipe.yaml", text)
    outer = f'bash -c "$(cat {shell.heredoc(script)}\n)"'
    subprocess.run(["bash", "-c", outer], check=True, env={"HOME": str(tmp_path), "PATH": "/bin"})
    assert (tmp_path / "launch" / "recipe.yaml").read_text() == text


def test_keys_reach_the_training_as_they_are_in_a_pod(tmp_path):
    odd = "train.seed=1 # $(HF_TOKEN) $$ `id` ' \" $HOME"
    recipe, job_set = parts(
        find("gke").write(
            dataclasses.replace(launch("v6e-8", keep=False), keys=(odd, "a: {b: |\n  c}"))
        )
    )
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    *shell, script = pod["containers"][0]["command"]
    script = script.replace("$$", "$").replace("cd /recipe", "").replace("exec windlass", "show")
    show = "pip() { :; }; show() { printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run([*shell, show + script], capture_output=True, text=True)
    assert done.stdout.split("\0")[:-1] == ["train", "quickstart.yaml", odd, "a: {b: |\n  c}"]
    assert "$(HF_TOKEN)" not in pod["containers"][0]["command"][-1].replace("$$", "")


def test_keys_and_recipe_reach_the_training_as_they_are_in_the_shell_of_skypilot(tmp_path):
    odd = ('a=it\'s !! $(id) `id`\n!$ "!!"', "b=\\ !cat")
    text = '# it\'s "odd!!"\nEND\n!$ $(id)\n'
    one = launch("v6e-8")
    one = dataclasses.replace(one, keys=odd, recipe=Written("mine", text))
    (task,) = parts(find("skypilot").write(one))
    executable(tmp_path / "uv", '#!/bin/sh\nmkdir -p "$HOME/windlass"\n')
    executable(tmp_path / "program", '#!/bin/sh\nprintf \'%s\\0\' "$@" > "$HOME/words"\n')
    script = tmp_path / "script"
    place = "windlass() { program \"$@\"; }\necho '!!'\n"
    script.write_text(place + task["setup"] + task["run"])
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-i", script], env=environment, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words == ["train", "mine.yaml", *odd]
    assert (tmp_path / "launch" / "mine.yaml").read_text() == text
