"""Python API: each command as one call."""

from windlass.api.checkup import doctor
from windlass.api.checkup.check import Check
from windlass.api.evaluation import diagnose, evaluate, subject, tasks
from windlass.api.generation import chat, each, generate, stream
from windlass.api.launching import launch, launches
from windlass.api.planning import best, calibrate, plan, plans, prices
from windlass.api.run_folders import compare, delete, report, runs, standing, verify, watch
from windlass.api.teaching import teach
from windlass.api.training import data, new, recipe, schema, train
from windlass.release.export import export
from windlass.run_folder.runs import RUNS, Standing, check_deletable, find, is_run
from windlass.training.loop import Trained
from windlass.training.teaching import Taught

__all__ = [
    "RUNS",
    "Check",
    "Standing",
    "Taught",
    "Trained",
    "best",
    "calibrate",
    "chat",
    "check_deletable",
    "compare",
    "data",
    "delete",
    "diagnose",
    "doctor",
    "each",
    "evaluate",
    "export",
    "find",
    "generate",
    "is_run",
    "launch",
    "launches",
    "new",
    "plan",
    "plans",
    "prices",
    "recipe",
    "report",
    "runs",
    "schema",
    "standing",
    "stream",
    "subject",
    "tasks",
    "teach",
    "train",
    "verify",
    "watch",
]
