"""What `make test` leaves out holds: the rest of full products, many processes in a row."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 500  # letters of what a test says


def prove() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "long"]
        command = [sys.executable, "-m", "pytest", *words, f"--junitxml={report}"]
        print(flush=True)  # it says how far it is, for it takes an hour and more on two cores
        done = subprocess.run(command, cwd=ROOT)
        if not report.exists():
            raise SystemExit("pytest wrote no report: what it printed above says why")
        cases = list(ElementTree.parse(report).iter("testcase"))
    unmet = [case for case in cases if len(case)]  # failed, broken or skipped
    return {
        "holds": done.returncode == 0 and bool(cases) and not unmet,
        "tests": len(cases),
        "unmet": {
            f"{case.get('classname')}::{case.get('name')}": (case[0].get("message") or "")[:LONGEST]
            for case in unmet
        },
    }
