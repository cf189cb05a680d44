"""Notebooks run from top to bottom in a kernel of their own, with less data and smaller models."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import published, trained
from tests.flags import quick

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ONE = {"device": "cpu", "device.count": 1, "telemetry.every": 1}
STORIES = {"data.source.count": 100, "data.validation": 0.05, "data.length": 32}
# In place of the cell that is tagged `parameters`.
REDUCED: dict[str, dict[str, Any]] = {
    "quickstart": {"train.steps": 3, "train.batch": 4, **STORIES},
    "legal-cot-sft": {
        **{"train.epochs": None, "train.steps": 2, "train.batch": 4},
        **{"data.length": 256, "data.longer": "cut"},
    },
    "recovery-lora": {
        **{"train.steps": 2, "train.batch": 4, "train.accumulation": 1, "adapter.0.group": 8},
        **STORIES,
    },
    "nash-mhc": {
        **{"train.steps": 2, "train.batch": 4, "train.sample": None, "residual.streams": 2},
        **{"model.embed": 32, "model.mlp": 48, "model.heads": 4, "model.layers": 1},
        **{"model.scales": 2, **STORIES},
    },
    "sudoku": {
        **{"train.steps": 2, "train.batch": 8, "train.layers_per_loop": 1, "model.layers": 1},
        **{"model.passes": 2, "model.h_cycles": 1, "data.source.count": 400},
    },
}
QUICK = ("quickstart",)  # the others run among the long tests
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def tagged(notebook: nbformat.NotebookNode, tag: str) -> nbformat.NotebookNode:
    (cell,) = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return cell


def test_there_is_a_notebook_for_each_way_to_start():
    assert [path.stem for path in NOTEBOOKS] == sorted(REDUCED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_checks_trains_looks_and_exports_and_holds_no_output(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells[0] == tagged(notebook, "install")
    assert "%pip install" in cells[0].source
    order = ("windlass.doctor(", "windlass.train(", "done.metrics", "windlass.report(")
    sources = "\n".join(cell.source for cell in cells)
    places = [sources.index(call) for call in (*order, "windlass.export(")]
    assert places == sorted(places)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A cache of the hub in which every model of a notebook is a tiny one."""
    return published.in_cache(tmp_path_factory.mktemp("hub"), *MODELS)


def outputs(notebook: nbformat.NotebookNode, call: str) -> list[dict[str, Any]]:
    """Outputs of a cell with a call, by kind of content."""
    (cell,) = [cell for cell in notebook.cells if call in cell.source]
    return [one.data for one in cell.outputs if "data" in one]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.long] if path.stem not in QUICK else [])
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_from_top_to_bottom(path, hub, tmp_path, monkeypatch):
    for name, value in trained.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XLA_FLAGS", quick())
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    notebook = read(path)
    notebook.cells.remove(tagged(notebook, "install"))
    tagged(notebook, "parameters").source = f"keys = {REDUCED[path.stem] | ONE!r}"
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    (plot, outcome) = outputs(notebook, "windlass.train(")
    assert "<polyline" in plot["text/html"] and "step " in plot["text/html"]
    assert "finished at step" in outcome["text/html"]
    (frame,) = outputs(notebook, "done.metrics")
    assert "loss" in frame["text/html"]
    (page,) = outputs(notebook, "windlass.report(")
    assert page["text/html"].startswith("<iframe")
    (files,) = outputs(notebook, "windlass.export(")
    assert "safetensors" in files["text/html"]
    assert json.dumps(notebook)  # all of it can be stored
