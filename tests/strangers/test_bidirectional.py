"""A bidirectional family has no next token: every way to generate from it is refused."""

from pathlib import Path

import pytest
import yaml

from tests import strangers
from windlass import api
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.training.train import train

ONE = ["device.kind=cpu", "device.count=1", "train.steps=1", "data.validation=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    recipe = yaml.safe_load((strangers.HERE / "recipes/bidirectional.yaml").read_text())
    folder = tmp_path_factory.mktemp("bidirectional") / "run"
    train(recipe, [f"run.dir={folder}", *ONE], signals=Signals())
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        lambda run: api.generate(run, "Once"),
        lambda run: list(api.stream(run, "Once")),
        api.chat,
        lambda run: api.tasks(run, "hellaswag"),
    ],
)
def test_generation_is_refused(run, call):
    with pytest.raises(UserError) as refusal:
        call(run)
    assert str(refusal.value) == (
        f"{run} cannot generate: bidirectional, its family, attends in both directions, and no "
        f"token is predicted from those before it; `windlass evaluate {run}` measures its loss"
    )
