"""Run the long experiments, and write what they found beside them: proofs/<name>.json.

make proof                                     all that a CPU can run
.venv/bin/python proofs/run.py kill            one
.venv/bin/python proofs/run.py gpu gpu_bits    where there is an NVIDIA GPU
.venv/bin/python proofs/run.py tpu             on an x86-64 host with libtpu; no TPU is needed
"""

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ALL = (
    *("quickstart", "finetune", "meshes", "hosts", "processes", "huggingface", "kill", "load"),
    *("bytes", "hostile", "limits", "launch", "plan", "distil", "reservoir"),
    *("characters", "long_tests"),
)

# Before JAX is imported: the meshes need devices, which a CPU only has if told so.
if not {"gpu", "gpu_bits"} & {*sys.argv}:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(HERE.parent))


def main(names: list[str]) -> int:
    failed = []
    for name in names or ALL:
        print(f"{name}: ", end="", flush=True)
        began = time.time()
        figures = importlib.import_module(f"proofs.{name}").prove()
        record = {
            "command": f"python proofs/run.py {name}",
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": versions(),
            "seconds": round(time.time() - began, 1),
            **figures,
        }
        (HERE / f"{name}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        print("holds" if figures["holds"] else "DOES NOT HOLD", f"({record['seconds']} s)")
        if not figures["holds"]:
            failed.append(name)
    return 1 if failed else 0


def commit() -> str:
    def git(*words: str) -> str:
        asked = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True)
        return asked.stdout.strip()

    changed = git("status", "--porcelain", "--", "windlass", "tests", "proofs/*.py")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("jax", "equinox", "optax", "orbax-checkpoint", "grain")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
