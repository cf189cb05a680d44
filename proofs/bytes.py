"""A bit flipped, an end cut off or a file gone: it is named, or what is computed is the same.

Of every kind of file of a run, of prepared data, of an export and of the compiled programs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRIES = {"run": 100, "tuned": 80, "cache": 60, "export": 48, "compiled": 12}


def prove() -> dict:
    """Figures of the campaign, in a process of its own: caches and devices are set at its start."""
    with tempfile.TemporaryDirectory() as place:
        from tests.flags import quick

        root = str(Path(__file__).parents[1])
        own = {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick()}
        own |= {"WINDLASS_CACHE": f"{place}/cache", "HF_HUB_OFFLINE": "1"}
        inherited = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
        command = [sys.executable, "-m", "proofs.bytes", f"{place}/figures.json", "1"]
        subprocess.run(command, cwd=place, env=inherited | own, check=True)
        return json.loads(Path(f"{place}/figures.json").read_text())


def main(share: float) -> dict:
    import windlass
    from tests import damage, trained
    from tests.training import test_reference as pairs

    here, cache = Path.cwd(), {"cache": "prepared"}
    trained.write_corpus(here / trained.CORPUS, trained.DOCUMENTS)
    pairs.write(here)
    once = {"every": 100, "keep": 1}
    scratch = trained.recipe(train={"sample": "Once"}, checkpoint=once, data=cache)
    windlass.train(scratch, ["run.dir=run"])
    windlass.export("run", "export")
    tuned = {
        **{name: pairs.RECIPE[name] for name in ("objective", "adapter", "optim", "device")},
        "model": {"path": "export"},
        "data": {**pairs.RECIPE["data"], **cache},
        "train": {"steps": 2, "batch": 16},
        "checkpoint": once,
    }
    windlass.train(tuned, ["run.dir=tuned"])
    subjects = {
        "run": damage.run(here / "run"),
        "tuned": damage.run(here / "tuned")._replace(name="tuned"),
        "cache": damage.cache(here / "prepared", here / "run"),
        "export": damage.export(here / "export"),
        "compiled": damage.compiled(Path(os.environ["WINDLASS_CACHE"]) / "compiled", here / "run"),
    }
    outcomes = []
    for name, subject in subjects.items():
        outcomes += damage.campaign(subject, int(TRIES[name] * share), 0)
    return damage.totals(outcomes)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(float(sys.argv[2]))))
