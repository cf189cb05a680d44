"""A part of the campaign of hostile inputs; `make proof` tries the whole."""

import pytest

from tests import hostile, trained

EACH = 5


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_a_hostile_input_gets_a_message_and_executes_nothing(
    kind, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hostile, "KINDS", {kind: hostile.KINDS[kind]})
    for name in ("HOME", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WINDLASS_CACHE"):
        monkeypatch.setenv(name, "")  # so that it is put back
    run = trained.only_run(trained.workplace(tmp_path_factory))
    outcomes = hostile.campaign(hostile.ground(tmp_path / "place", run), 1, EACH)
    figures = hostile.figures(outcomes)
    assert figures["failures"] == []
    assert figures["tried"] == EACH
