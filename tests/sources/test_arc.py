"""ARC as a source of blocks: tasks from folders, copies with identifiers, what is held out."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.data import Data, Prepared, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.puzzles import arc
from windlass.reports.boards import boards
from windlass.run_folder.answers import Answered, Answers
from windlass.sources.arc import Source


def task(seed: int, demonstrations: int = 3, tests: int = 1) -> dict[str, Any]:
    """A task: turn a grid upside down."""
    rng = np.random.default_rng(seed)

    def pair() -> dict[str, Any]:
        grid = rng.integers(10, size=rng.integers(2, 7, size=2))
        return {"input": grid.tolist(), "output": grid[::-1].tolist()}

    made = {"train": [pair() for _ in range(demonstrations)]}
    return made | {"test": [pair() for _ in range(tests)]}


def write(folder: Path, **tasks: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tasks.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = write(tmp_path / "training", a=task(0), b=task(1))
    evaluation = write(tmp_path / "evaluation", c=task(2, tests=2), d=task(3))
    return Source(path=path, evaluation=evaluation, copies=5)


def whole(data: Prepared, name: str) -> dict[str, np.ndarray]:
    return data.split(name).batch(range(len(data.split(name))))


def grids(rows: dict[str, np.ndarray], name: str) -> list[list]:
    return [arc.cropped(canvas).tolist() for canvas in rows[name]]


def test_rows_are_pairs_on_canvases_whose_padding_weighs_nothing(source: Source):
    rows = source.rows(np.arange(len(source)), None, 0)
    assert {name: (x.dtype, x.shape[1:]) for name, x in rows.items()} == {
        name: (column.dtype, column.axes) for name, column in source.columns.items()
    }
    expected = [pair for seed in (0, 1) for kind in ("train", "test") for pair in task(seed)[kind]]
    expected += [pair for seed in (2, 3) for pair in task(seed, tests=2)["train"]]
    assert grids(rows, "tokens") == [pair["input"] for pair in expected]
    assert grids(rows, "targets") == [pair["output"] for pair in expected]
    assert ((rows["targets"] == 0) == (rows["weight"] == 0)).all()
    assert source.vocab == 12 and source.identifiers == 1 + 4 * 5
    assert rows["identifier"].tolist() == [*[1] * 4, *[6] * 4, *[11] * 3, *[16] * 3]


def test_cells_are_drawn_in_their_colors(source: Source):
    rows = source.rows(np.array([0]), None, 0)
    tokens, targets, weight = (rows[name][0].tolist() for name in ("tokens", "targets", "weight"))
    solved = Answered(tokens, targets, weight, [targets], [0.9])
    page = boards(Answers(1, source.picture, [1.0], 1, [solved]))
    cells = re.findall(r'<g class="(?:given|right s1-1)">(.*?)</g>', page)
    drawn = [re.sub(r"<rect [^>]*?(?:fill:(#\w+)[^>]*)?>|</?text[^>]*>", r"\1", x) for x in cells]
    output = np.array(task(0)["train"][0]["output"])
    high, wide = output.shape
    board = np.array(drawn).reshape(30, 30)
    names = {0: "#000000", 1: "#0074d9", 2: "#ff4136", 3: "#2ecc40", 4: "#ffdc00"}
    names |= {5: "#aaaaaa", 6: "#f012be", 7: "#ff851b", 8: "#7fdbff", 9: "#870c25"}
    assert board[:high, :wide].tolist() == [[names[color] for color in row] for row in output]
    assert {*board[:high, wide], *board[high, :wide]} == {"|"}
    assert {*board[high + 1 :].flat, *board[:, wide + 1 :].flat} == {""}


def test_test_pairs_of_evaluation_tasks_are_held_out_and_in_no_task_trained_on(
    source: Source, tmp_path: Path
):
    # The newer training set of ARC holds tasks of the older evaluation set.
    write(tmp_path / "training", e=task(2, tests=2), f={"train": task(3)["test"], "test": []})
    data = prepare(Data(source=source), Tokenizer())
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 17, "validation": 3}
    held_out = whole(data, "validation")
    asked = [*task(2, tests=2)["test"], *task(3)["test"]]
    assert grids(held_out, "tokens") == [pair["input"] for pair in asked]
    inputs = grids(whole(data, "train"), "tokens")
    assert not [pair for pair in asked if pair["input"] in inputs]
    assert sum(pair["input"] in inputs for pair in task(2)["train"]) == 3
    # Their identifiers are those of the demonstrations of the same task, which are trained on.
    assert held_out["identifier"].tolist() == [21, 21, 26]
    assert {21, 26} <= {*whole(data, "train")["identifier"].tolist()}


def test_an_epoch_is_another_copy_under_the_symmetry_that_its_identifier_names(source: Source):
    numbers = np.full(300, 5)
    rows = source.rows(numbers, np.arange(300), 7)
    copies = rows["identifier"] - 6
    assert {*copies.tolist()} == {*range(5)}
    for number in range(5):
        some = {name: x[copies == number] for name, x in rows.items()}
        seen = {arc.cropped(_moved(canvas)).tobytes() for canvas in some["targets"]}
        assert len(seen) == 1  # wherever it stands on the canvas
        (variant,) = source.variant(numbers[:1], number)["targets"]
        assert seen == {arc.cropped(variant).tobytes()}
        assert len({*map(bytes, some["tokens"])}) > 10
    again = source.rows(numbers[20:30], np.arange(20, 30), 7)
    assert all((again[name] == x[20:30]).all() for name, x in rows.items())
    assert (source.rows(numbers, np.arange(300), 8)["tokens"] != rows["tokens"]).any()
    still = Source(path=source.path, copies=1, translate=False)
    plain = still.rows(np.array([0]), None, 0)["tokens"]
    assert (still.rows(np.zeros(9, int), np.arange(9), 3)["tokens"] == plain).all()


def _moved(canvas: np.ndarray) -> np.ndarray:
    """A canvas with its grid in the upper left corner."""
    board = canvas.reshape(30, 30)
    row, column = (np.argmax((board > 1).any(axis=axis)) for axis in (1, 0))
    return np.roll(board, (-row, -column), (0, 1)).reshape(-1)


def test_an_answer_to_a_copy_is_restored_to_the_grid_that_was_asked_for(source: Source):
    numbers = source.held_out_numbers("validation")
    plain = source.rows(numbers, None, 0)["targets"]
    for copy in range(5):
        answers = source.variant(numbers, copy)["targets"].copy()
        assert copy == 0 or (answers != plain).any()
        answers[answers == arc.PADDING] = 5  # beyond the end of a grid anything may stand
        assert (source.restored(numbers, copy, answers) == plain).all()


def test_tasks_of_one_folder_alone_are_trained_on_whole_or_asked(tmp_path: Path):
    folder = write(tmp_path / "tasks", a=task(0), b=task(1))
    assert len(Source(path=folder)) == 8 and Source(path=folder).held_out == ()
    asked = Source(evaluation=folder)
    assert len(asked) == 6 and len(asked.held_out_numbers("validation")) == 2


def test_the_fingerprint_is_of_the_pairs_and_not_of_their_place(tmp_path: Path):
    one, same, other = (
        Source(path=write(tmp_path / name, a=task(seed))).fingerprint()
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert one == same != other
    path = str(tmp_path / "one")
    assert len({one, *(Source(path=path, copies=2, seed=s).fingerprint() for s in (0, 1))}) == 3


def test_a_task_is_shown_as_two_grids(tmp_path: Path):
    pair = {"input": [[1, 2], [3, 0]], "output": [[4]]}
    source = Source(path=write(tmp_path / "a", a={"train": [pair], "test": []}))
    row = {name: x[0] for name, x in source.rows(np.array([0]), None, 0).items()}
    gap = " " * 29
    assert source.shown(row).splitlines() == [
        "task 0, copy 0",
        f"12|{gap}4|",
        f"30|{gap}|",
        "||",
    ]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "is not JSON: "),
        ([], "is not an ARC task: an object with train and test, each a list of pairs"),
        ({"train": []}, "is not an ARC task: an object with train and test, each a list of pairs"),
        (
            {"train": [], "test": [{"input": [[1]]}]},
            "test 0 has no output, a grid: a list of rows, each a list of colors",
        ),
        (
            {"train": [{"input": [[1, 2], [3]], "output": [[1]]}], "test": []},
            "train 0 has an input with rows of 1 and 2 cells",
        ),
        (
            {"train": [{"input": [[1]], "output": [[1] * 31]}], "test": []},
            "train 0 has an output of 1 × 31 cells; a grid has up to 30 × 30",
        ),
        (
            {"train": [{"input": [[1]], "output": [[10]]}], "test": []},
            "train 0 has the color 10 in its output; colors are 0 to 9",
        ),
    ],
)
def test_a_file_that_is_no_task_is_refused_by_its_name(tmp_path: Path, content: Any, what: str):
    folder = write(tmp_path / "tasks", a=content)
    with pytest.raises(UserError) as refused:
        len(Source(path=folder))
    assert str(refused.value).startswith(f"{folder}/a.json {what}")


def test_folders_that_are_not_there_and_keys_that_cannot_be_are_refused(tmp_path: Path):
    with pytest.raises(UserError) as absent:
        len(Source(evaluation=f"{tmp_path}/data/evaluation"))
    assert str(absent.value) == (
        f"data.source.evaluation is {tmp_path}/data/evaluation, which does not exist; it is looked "
        f"for from {Path.cwd()}; `git clone https://github.com/fchollet/ARC-AGI` has such folders, "
        "data/training and data/evaluation"
    )
    with pytest.raises(ValueError) as wrong:
        Source(copies=0)
    assert [*wrong.value.args] == [
        "path is required, or evaluation: a folder of tasks, a JSON file each",
        "copies is 0; a task has at least 1, itself",
    ]
