"""What is traced for a plan, and how often."""

import gc

from tests.trained import recipe
from windlass.models import qwen3
from windlass.planning import targets, traced
from windlass.processes.garbage import uncollected
from windlass.program.abstract import abstract_model
from windlass.program.built import Built
from windlass.program.programs import Programs


def test_a_model_is_made_once_for_all_targets(monkeypatch):
    made, init = [], qwen3.Config.init

    def counted(self, key):
        made.append(self)
        return init(self, key)

    monkeypatch.setattr(qwen3.Config, "init", counted)
    abstract_model.cache_clear()
    for target in targets.several("v5e-8,v6e-1,h200"):
        described = traced.described(recipe(adapter={"kind": "lora"}), target)
        with described.scope():
            Programs(Built(described), 1).abstract_state()
    assert len(made) == 2  # with its adapter, and without


def test_python_looks_for_garbage_after_a_plan_as_it_did_before():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
