"""Signs of life before a run begins: while its recipe is read, its devices start, data is read."""

import io
import time

import pytest
from rich.console import Console

from tests import trained
from windlass.devices import selection
from windlass.errors import UserError
from windlass.starting import frozen_models, origin
from windlass.telemetry.console import ConsoleReport
from windlass.training import train as entry


def test_whoever_waits_for_the_hub_a_device_or_data_is_told_so(here, monkeypatch):
    def slowly(call):
        def slow(*args, **options):
            time.sleep(0.3)
            return call(*args, **options)

        return slow

    def refuse(*args):
        time.sleep(0.3)
        raise UserError("that will do")

    monkeypatch.setattr(origin, "load", slowly(origin.load))
    monkeypatch.setattr(selection, "choose_here", slowly(selection.choose_here))
    monkeypatch.setattr(frozen_models, "check", slowly(frozen_models.check))
    monkeypatch.setattr(entry, "open_session", refuse)
    file = io.StringIO()
    with ConsoleReport(Console(file=file), patience=0.05) as report:
        with pytest.raises(UserError, match="that will do"):
            entry.train(trained.recipe(), report=report)
    lines = file.getvalue().splitlines()
    for doing in (
        *("reading the recipe", "starting the devices"),
        *("looking for the weights to start from", "preparing the data"),
    ):
        assert f"{doing}, 0:00" in lines
