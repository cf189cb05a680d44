"""Metrics of runs as CSV, a line for each step."""

import csv
import io
from collections.abc import Sequence

from windlass.reports.run_summary import Account


def csv_table(runs: Sequence[Account]) -> str:
    """CSV of all metrics by step; of several runs, with the run in the first column."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    several = ["run"] if len(runs) > 1 else []
    out = io.StringIO()
    table = csv.DictWriter(out, [*several, *names], lineterminator="\n")
    table.writeheader()
    for run in runs:
        folder = {"run": str(run.standing.folder)} if several else {}
        table.writerows(folder | record for record in run.records)
    return out.getvalue()
