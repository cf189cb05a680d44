"""Fine-tuning on documents of unequal length on one GPU: packed, beside padded and padding-free.

    python benchmarks/sft.py [--rival padded|padding-free] [--to benchmarks/sft.json]
    python benchmarks/sft.py --small          # at a tiny size, on whatever is here

Qwen2.5-0.5B with all weights, rows of 2,048 tokens, 16 of them a step. Lengths of documents are
log-normal as those of chats are: a median of 250 tokens, a mean near 370, at most 2,048. All sides
train on the same documents in each step, with the same weights, AdamW and clip, and their losses
must agree first. Sides, of which tokens that are trained on are counted in a second:

- windlass: documents packed into rows, attention within each of them;
- padded: transformers, 16 documents at a time, padded to the longest of them and to a multiple of
  8, as its collators do; the layers are compiled for any length, which its Trainer does not do
  unless it is told;
- padding-free: the same, compiled as one, all documents in one row, by PyTorch's flash kernel for
  such rows.

Padded steps take some times as long: fewer of them are taken.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import gpu, rivals  # noqa: E402

CASE = gpu.Case("Qwen2.5-0.5B", 16, rivals.LONGEST)
RIVALS = {"padded": 16, "padding-free": None}  # documents at a time
FEW = 5, 4  # steps whose losses must agree, and steps in a turn, beside the padded
MEDIAN, SPREAD = 250, 0.9  # of the log-normal lengths
UPDATES = gpu.AGREE + gpu.STEPS

Documents = Sequence[np.ndarray]


def documents(case: gpu.Case) -> Iterator[list[Documents]]:
    """Documents of each step, by the row they are packed into."""
    from windlass.data.pack import best_fit

    random, vocab = np.random.default_rng(0), gpu.SHAPES[case.model]["vocab"]
    follows = random.permutation(vocab)
    median = MEDIAN * case.length / rivals.LONGEST
    count = round(1.1 * UPDATES * case.tokens / (median * np.exp(SPREAD**2 / 2)))
    sizes = np.clip(random.lognormal(np.log(median), SPREAD, count), 8, case.length).astype(int)
    rows: dict[int, list[np.ndarray]] = {}
    for size, row in zip(sizes, best_fit(sizes, case.length), strict=True):
        one = random.integers(vocab, size=size + 1).astype(np.int32)
        for place in np.flatnonzero(random.random(size) < 0.5) + 1:
            one[place] = follows[one[place - 1]]
        rows.setdefault(int(row), []).append(one)
    # Rows in random order: those that were packed last have more room left.
    order = random.permutation(list(rows))
    for first in range(0, len(order) - case.rows + 1, case.rows):
        yield [rows[row] for row in order[first : first + case.rows]]


def packed(rows: list[Documents], length: int) -> dict[str, np.ndarray]:
    """Columns of packed rows."""
    shape = len(rows), length
    columns = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "position")}
    columns |= {"weight": np.zeros(shape, np.float32), "document": np.full(shape, -1, np.int32)}
    for row, each in enumerate(rows):
        end = 0
        for number, one in enumerate(each):
            at = row, slice(end, end := end + len(one) - 1)
            columns["tokens"][at], columns["targets"][at] = one[:-1], one[1:]
            columns["position"][at] = np.arange(len(one) - 1)
            columns["weight"][at], columns["document"][at] = 1, number
    return columns


def flat(rows: list[Documents]) -> Documents:
    return [one for each in rows for one in each]


def running(case: gpu.Case, settings: Sequence[str] = ()) -> gpu.Running:
    """Windlass's step of packed rows."""
    programs = gpu.programs(case, is_adapted=False, settings=settings, documents="several")
    return gpu.running(programs, lambda rows: packed(rows, case.length))


def measured(case: gpu.Case, rival: str) -> dict[str, Any]:
    given = list(documents(case))
    config, tensors = gpu.first(case)
    own = running(case)
    gpu.note("windlass has its weights")
    agreed, steps = (gpu.AGREE, gpu.STEPS) if RIVALS[rival] is None else FEW
    with ThreadPoolExecutor(1) as pool:
        # Beside the rival, which compiles in its first step.
        compiling = pool.submit(own.compiled)
        other = rivals.of_documents(rivals.Begin(config, tensors, None, 1), RIVALS[rival])
        step, wait, peak = other
        there = gpu.Side(lambda rows: step(flat(rows)), wait, peak)
        sides, rows = {rival: there, "windlass": own.side.after(compiling)}, iter(given)
        losses = gpu.agreement(sides, rows, agreed)
    taken = gpu.seconds(sides, rows, steps)
    timed = given[agreed : agreed + steps]
    tokens = statistics.mean(sum(len(one) - 1 for one in flat(rows)) for rows in timed)
    ratios = [a / b for a, b in zip(taken[rival], taken["windlass"], strict=True)]
    return {
        "losses": {name: each[-1] for name, each in losses.items()},
        "trained_tokens_a_step": round(tokens),
        "of_positions": round(tokens / case.tokens, 3),
        "documents_per_row": round(statistics.mean(len(one) for rows in timed for one in rows), 2),
        **{
            name: {
                "trained_tokens_per_second": round(tokens / statistics.median(times)),
                "peak_gib": round(sides[name].peak() / 2**30, 2),
            }
            for name, times in taken.items()
        },
        "ratio": round(statistics.median(ratios), 3),
        "turns": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rival", choices=RIVALS, help="one of them; both in turn by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try it anywhere")
    parser.add_argument("--to", type=Path, default=HERE / "sft.json")
    asked = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if asked.rival is None:
        for rival in RIVALS:
            words = [sys.executable, __file__, "--rival", rival, "--to", str(asked.to)]
            subprocess.run([*words, *(["--small"] if asked.small else [])], check=True)
        return
    case = CASE.small() if asked.small else CASE
    found = {**gpu.setting(), "case": case._asdict(), **measured(case, asked.rival)}
    print(asked.rival, json.dumps(found, indent=1))
    if not asked.small:
        held = json.loads(asked.to.read_text()) if asked.to.exists() else {}
        asked.to.write_text(json.dumps(held | {asked.rival: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
