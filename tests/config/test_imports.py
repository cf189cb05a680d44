"""What it costs to ask for help, and to read a recipe."""

import subprocess
import sys

import pytest

from tests import trained

# Frameworks, trackers, clients of hubs and clouds, and what only training or reading data needs.
HEAVY = (
    "torch transformers tensorflow tensorboard wandb trackio huggingface_hub datasets pyarrow "
    "gcsfs s3fs adlfs aiohttp requests grain orbax tensorstore"
).split()


def imported(script: str) -> list[str]:
    """The first words of all modules that are there after a script."""
    ends = "\nimport sys\nprint('\\nimported', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script + ends],
        env=trained.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rpartition("imported ")[2].split()


@pytest.mark.parametrize(
    "script",
    [
        "import windlass, windlass.config\n"
        "windlass.config.load({'train.batch': 3}, ['train.steps=2']).merged('tpu')",
        "from windlass.cli.commands import run\nfrom windlass.processes.signals import Signals\n"
        "assert run(['--help'], Signals()) == 0 == run(['train', '--help'], Signals())\n"
        "assert run(['train'], Signals()) == 0",
    ],
    ids=["merging a recipe", "help"],
)
def test_help_and_the_keys_of_a_recipe_need_no_jax(script):
    assert not {"jax", "numpy", *HEAVY} & set(imported(script))


def test_reading_a_recipe_starts_no_accelerator_and_no_client():
    # The schema asks every family, source, objective and optimiser for its keys.
    script = (
        "from windlass.config import json_schema, load, shipped\nfrom windlass.run import Run\n"
        "for layers in map(load, shipped()):\n"
        "    if 'family' in layers.recipe['model']:\n        layers.read(Run, 'tpu')\n"
        "json_schema(Run)\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    )
    found = set(imported(script))
    assert "jax" in found
    assert not found & set(HEAVY)
