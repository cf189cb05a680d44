"""Every benchmark that a machine without an accelerator can run, in one table; `make bench`.

    python benchmarks/all.py

About eight minutes on two cores. Each is a process of its own, at its smallest size; for its other
sizes, and on a GPU, run it by itself. Nothing is asserted: a time is of one machine and one moment,
and ratios are of sides that were measured side by side.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import table  # noqa: E402
from benchmarks.table import Line  # noqa: E402

PARTS = {
    "startup": [],
    "data": ["--documents", "5000"],
    "checkpoint": ["--gib", "0.25", "--every", "5"],
    "presets": ["quickstart", "sudoku-4x4"],
    "cpu": [],
}


def main() -> None:
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in PARTS.items():
            print(f"\n== {name}", flush=True)
            began, to = time.monotonic(), Path(folder) / f"{name}.json"
            done = subprocess.run([sys.executable, HERE / f"{name}.py", *words, "--to", to])
            print(f"{time.monotonic() - began:.0f} s", flush=True)
            lines += table.read(to) if done.returncode == 0 else [Line(name, "failed")]
    print(f"\n{table.text(lines)}")


if __name__ == "__main__":
    main()
