"""`windlass plan`: what it says, and what it refuses."""

import json
import math
from pathlib import Path

import equinox as eqx
import jax
import pytest
import yaml

from tests import tiny, trained
from windlass.config import listing, read, shipped
from windlass.errors import UserError
from windlass.models.qwen3 import Config
from windlass.planning import matrix, targets
from windlass.planning.prices import load
from windlass.starting import origin


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """The tiny recipe in a file, with documents that nobody tokenised."""
    folder = tmp_path_factory.mktemp("planned")
    written = trained.recipe(train={"steps": 3600, "batch": 8}) | {"by_device": {}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(written))
    return folder / "tiny.yaml"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["plan"],
            f"which recipe? A YAML file, or {listing(shipped())}",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--rows", "none"],
            '--rows is "none"; it must be a whole number or null',
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--rows", "0"],
            "--rows is 0; it must be 1 or more",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--preemptions", "-1"],
            "--preemptions is -1; it must be 0 or more",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--each", "train.batch"],
            "--each is train.batch; it must be a key and its values, as train.batch=8,16",
        ),
        (
            ["plan", "quickstart,quickstat", "--on", "v5e-8"],
            'no file or recipe named "quickstat"; did you mean quickstart? '
            f"there are {listing(shipped(), 'and')}",
        ),
        (
            ["plan", "quickstart", "--best", "fastst", "--budget", "much", "--within", "6"],
            '--budget is "much"; it must be a number or null\n'
            '--within is "6"; it must be a time such as 90min, 6h or 2d\n'
            '--best is "fastst"; did you mean fastest?',
        ),
        (
            ["plan", "quickstart", "--budget", "0"],
            "--budget is 0; it must be above 0, in USD",
        ),
        (
            ["plan", "quickstart", "--best", "--each", "train.batch=4,8"],
            "--each and --best are given; --each plans the values named, --best searches",
        ),
        (
            ["plan", "quickstart", "--on", "cpu", "--best"],
            "no speed estimate for CPUs, so --best cannot rank settings there; "
            "train.microbatch=auto chooses the largest microbatch that fits",
        ),
        # Said once, and not for each target.
        (
            ["plan", "quickstart", "--on", "v5e-8,v6e-1", "train.btch=8"],
            "1 problem in quickstart and the command line:\n"
            "  train.btch  unknown; did you mean batch?",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8,v6e-4", "train.batch=7", "mesh.fsdp=3"],
            "on v5e-8: 1 problem in quickstart and the command line:\n"
            "  mesh.fsdp  is 3; it must divide the 8 devices: 1, 2, 4 or 8\n"
            "on v6e-4: 1 problem in quickstart and the command line:\n"
            "  mesh.fsdp  is 3; it must divide the 4 devices: 1, 2 or 4",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_message(program, words, message):
    done = program(*words)
    assert (done.code, done.out, done.err) == (2, "", f"{message}\n")


def test_a_plan_for_a_program_has_every_figure_and_ends_with_1_where_a_recipe_fits_nowhere(
    program, recipe
):
    rows = 4_194_304
    words = ("--each", f"train.batch={rows}", "--rows", str(10 * rows), "--region", "gcp")
    asked = ("plan", "tiny.yaml", "--on", "v5e-1", *words, "--json", "--html", "p.html")
    done = program(*asked, cwd=recipe.parent)
    assert (done.code, done.err) == (1, "")
    (plan,) = json.loads(done.out)
    assert plan["target"]["name"] == "v5e-1" and plan["keys"] == [f"train.batch={rows}"]
    assert plan["settings"]["batch"] == rows and plan["fits"] == "no"
    length = {"tokens_per_step": rows * 90, "steps": 3600, "steps_per_epoch": 10}
    assert plan["length"] == length

    config = read(Config, {"vocab": 300, **tiny.WIDTHS}, origin="the test")
    shapes = eqx.filter_eval_shape(lambda: config.init(jax.random.key(0)))
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    parts = plan["memory"]["parts_bytes"]
    assert parts["weights"] == 4 * count
    assert 8 * count <= parts["optimiser"] < 8 * count + 64  # two moments, and a counter
    assert plan["memory"]["total_bytes"] == pytest.approx(sum(parts.values()), abs=len(parts))

    step, hours = plan["time"]["step_seconds"], plan["cost"]["run"]["hours"]
    assert step == pytest.approx(sum(plan["time"]["parts_seconds"].values()))
    assert hours["low"] < hours["expected"] < hours["high"]
    assert hours["expected"] > 3600 * step / 3600 + 4 / 60  # with a start and a compilation
    there = [price for price in load().find("v5e") if price.provider == "gcp" and price.on_demand]
    assert plan["cost"]["on_demand"]["on_demand"] == min(price.on_demand or 0 for price in there)

    page = (recipe.parent / "p.html").read_text()
    assert f"windlass {' '.join(asked)}</pre>" in page


def test_without_a_target_it_is_this_machine_and_what_help_says(program):
    here, *others = matrix.usual()
    assert here.chip.kind == "cpu"
    assert [target.name for target in others] == [
        "v5e-1",
        "v5e-8",
        "v6e-1",
        "v6e-8",
        "a100-40gb",
        "h100",
    ]
    said = " ".join(program("plan", "--help").out.split())
    assert "this machine, and v5e-1, v5e-8, v6e-1, v6e-8, a100 and h100." in said


def test_a_model_that_cannot_be_reached_is_said_as_it_is_to_train(program, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    with pytest.raises(UserError) as refusal:
        origin.load("legal-cot-sft")
    assert str(refusal.value).startswith("model.hub is Qwen/Qwen2.5-0.5B; the hub is not contacted")
    done = program("plan", "legal-cot-sft", "--on", "v5e-1")
    assert (done.code, done.out, done.err) == (2, "", f"{refusal.value}\n")


def test_a_page_that_cannot_be_written_is_said_before_anything_is_planned(program):
    done = program("plan", "tiny.yaml", "--on", "v5e-1", "--html", "no/p.html")
    message = "--html is no/p.html; there is no folder no\n"
    assert (done.code, done.out, done.err) == (2, "", message)


def test_the_best_settings_are_lines_to_write_and_words_to_say(program, tmp_path):
    wide = {"embed": 1024, "mlp": 4096}
    recipe = trained.recipe(model=wide, train={"batch": 64, "accumulation": 8})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**recipe, "by_device": {}}))
    # What the command line says stays as it is, and is no part of the search.
    keys = ["device=tpu", "train.remat=saved", "train.layers_per_loop=1"]
    done = program("plan", "mine.yaml", "--on", "v5e-1", "--best", *keys)
    assert done.code == 0, done.err
    lines = [line.strip() for line in done.out.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("write"))
    assert lines[at : at + 3] == [
        "write   train:",
        "accumulation: 1",
        f"or      windlass train mine.yaml {' '.join(keys)} train.accumulation=1",
    ]
    assert "why     train.accumulation 1: 64 sequences per device and microbatch, not 8" in lines
    assert any(line.startswith("note  spot costs are without restarts: ") for line in lines)


def test_files_of_one_name_in_several_folders_are_told_apart(recipe, tmp_path):
    other = tmp_path / recipe.name
    other.write_text(recipe.read_text())
    found = matrix.plans([recipe, other], targets.several("v5e-1"))
    assert [one.recipe for one in found] == [str(recipe), str(other)]
