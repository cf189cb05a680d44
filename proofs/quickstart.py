"""The quickstart learns: its validation loss is clearly below the corpus's unigram entropy."""

import re
import subprocess
import sys
import tempfile
import time

from proofs import program


def prove() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        ended = subprocess.run(
            [sys.executable, "-m", "windlass", "train", "quickstart"],
            cwd=folder,
            env=program.environment(folder),
            capture_output=True,
            text=True,
        )
        seconds = time.time() - began
    loss = float(re.findall(r"^loss .* ([\d.]+) nats a token on val", ended.stdout, re.M)[-1])
    entropy = float(re.findall(r"^unigram +([\d.]+)", ended.stdout, re.M)[-1])
    story = [line.strip() for line in ended.stdout.splitlines() if line.startswith("  ")][-1]
    return {
        "holds": ended.returncode == 0 and loss < entropy / 2,
        "wall_seconds": round(seconds, 1),
        "validation_loss": loss,
        "unigram_entropy": entropy,
        "story": story,
    }
