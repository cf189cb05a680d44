"""GPUs by SkyPilot: the task, its price, and what is refused."""

import copy

import jsonschema
import pytest
import yaml

from tests.launch.test_files import BATCH, INSTALL, schema
from windlass.errors import UserError
from windlass.launch import TARGETS, find, gpus, running
from windlass.launch.description import Launch
from windlass.launch.preparing import prepare
from windlass.planning import prices


def launch(name: str, **how) -> Launch:
    how = {"spot": True, "bucket": "gs://mine/runs", "install": INSTALL} | how
    return prepare("quickstart", BATCH, on=name, **how)


def task(name: str, **how) -> dict:
    found = yaml.safe_load(find("skypilot").write(launch(name, **how)))
    # As that of TPUs, but for the image and the zones that those have.
    known = copy.deepcopy(schema("skypilot"))
    resources = known["properties"]["resources"]
    resources["required"] = ["accelerators", "use_spot"]
    del resources["oneOf"], resources["properties"]["accelerator_args"]
    resources["properties"]["accelerators"]["pattern"] = "^[A-Z0-9-]+(GB)?:[1-8]$"
    resources["properties"]["infra"] = {"type": "string", "pattern": "^[a-z]+(/[a-z0-9-]+){0,2}$"}
    jsonschema.validate(found, known)
    return found


@pytest.mark.parametrize(
    ("name", "accelerators", "nodes"),
    [
        ("h100", "H100:1", 1),
        ("8xh100", "H100:8", 1),
        ("a100-80gb:4", "A100-80GB:4", 1),
        ("l4", "L4:1", 1),
        ("16xh200", "H200:8", 2),
    ],
)
def test_the_task_is_one_that_skypilot_accepts_on_any_cloud(name, accelerators, nodes):
    found = task(name)
    resources = found["resources"]
    assert (resources["accelerators"], found["num_nodes"]) == (accelerators, nodes)
    assert resources["use_spot"] and not {"infra", "any_of", "accelerator_args"} & {*resources}
    assert "windlass-lm[cuda] @ " in found["setup"] and "[tpu]" not in found["setup"]
    assert ("export MASTER_ADDR" in found["run"]) == (nodes > 1)
    assert "MEGASCALE" not in found["run"]
    assert running.obstacle(launch(name), find("skypilot")) is None


def test_a_cloud_is_named_as_skypilot_names_it():
    assert task("8xh100", region="aws/us-east-1")["resources"]["infra"] == "aws/us-east-1"
    assert find("skypilot").does(launch("8xh100", region="aws"))[0].endswith("spot 8xh100 in aws, "
        "and a small machine that watches over it")  # fmt: skip
    assert "on the cheapest cloud that has it" in find("skypilot").does(launch("h100"))[0]


def test_the_price_is_that_of_all_chips_in_the_catalogue():
    known = prices.cheapest(prices.load().find("h100"), "on_demand")
    assert known is not None and known.on_demand is not None
    shown = gpus.price(launch("8xh100"))
    assert shown is not None
    assert shown.startswith(f"${8 * known.on_demand:,.2f} an hour on demand at {known.place} (")


def refusal(name: str, **how) -> str:
    with pytest.raises(UserError) as refused:
        launch(name, **how)
    return str(refused.value)


def test_what_cannot_be_rented_is_refused():
    assert refusal("h100", zone="us-east5-b") == (
        "--zone is us-east5-b, which is of TPUs; GPUs are on many clouds: --region aws, or "
        "--region gcp/us-central1/us-central1-a, names one"
    )
    assert refusal("12xh100") == (
        '"12xh100" is no whole number of hosts, which have 8 GPUs each; 8xh100 or 16xh100 would do'
    )
    assert refusal("rtx-4060").startswith("SkyPilot rents no rtx-4060; it has t4, l4, ")
    for target in TARGETS:
        if target != "skypilot":
            with pytest.raises(UserError) as refused:
                find(target).check(launch("8xh100"))
            assert str(refused.value) == (
                "--on is 8xh100, and GPUs are rented by --to skypilot alone, on any cloud"
            )


def test_without_skypilot_nothing_is_rented(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError) as refused:
        running.start(launch("8xh100"), "skypilot")
    assert str(refused.value) == (
        "sky is not on this machine, and rents there (pip install 'windlass-lm[cloud]', then `sky "
        "check gcp`); --dry-run needs nothing, and prints the file"
    )
