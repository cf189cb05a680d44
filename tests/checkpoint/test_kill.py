"""A process killed with -9 inside a save leaves nothing worse than a message."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

IDENTITY = {"model": "small"}

# A process kills itself at a named moment of the save of step 2, or of the deletion after it. They
# are forks of one that imported all and did nothing yet: most of the time of a process is imports.
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import jax.numpy as jnp, numpy as np
from windlass import files
from windlass import seal
from windlass.checkpoint import store

for moment in sys.argv[2:]:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    else:
        break
else:
    sys.exit()

run = Path(sys.argv[1]) / moment
unfinished = run / "checkpoints" / "2.orbax-checkpoint-tmp"

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def when(condition):
    while not condition():
        time.sleep(0.0005)
    die()

def state(step):
    return {"x": jnp.asarray(np.random.default_rng(step).normal(size=(8, 200_000)), jnp.float32)}

saver = store.Store(run, say=print, keep=1)
saver.save(1, state(1), {"model": "small"})
saver.wait()
second = state(2)
if moment == "folder made":
    threading.Thread(target=when, args=(unfinished.exists,)).start()
elif moment == "arrays half written":
    data = lambda: any(p.stat().st_size > 1e6 for p in unfinished.glob("state*/*/d/*"))
    threading.Thread(target=when, args=(data,)).start()
elif moment == "hashes half written":
    files.Path.replace = die
elif moment == "committed":
    seal.extend = die
elif moment == "old one half deleted":
    store.shutil.rmtree = die
saver.save(2, second, {"model": "small"})
saver.wait()
"""


MOMENTS = {
    "folder made": (1, "2.orbax-checkpoint-tmp"),
    "arrays half written": (1, "2.orbax-checkpoint-tmp"),
    "hashes half written": (1, "2.orbax-checkpoint-tmp"),
    "committed": (2, None),
    "old one half deleted": (2, "1.removing"),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder with a run for each moment, killed then."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", PROGRAM, folder, *MOMENTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGKILL.value)] * len(MOMENTS), done.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_killed_at_any_moment_is_recovered_from(killed, opened, said, tmp_path, moment):
    step, left = MOMENTS[moment]
    shutil.copytree(killed / moment, tmp_path, dirs_exist_ok=True)
    store = opened(keep=1)
    assert left is None or (store.folder / left).exists()

    restored = store.restore({"x": jax.ShapeDtypeStruct((8, 200_000), jnp.float32)}, IDENTITY)
    expected = np.random.default_rng(step).normal(size=(8, 200_000)).astype(np.float32)
    assert restored.step == step and np.array_equal(restored.state["x"], expected)
    assert len(said) == (left is not None)
    assert left is None or (said[0].startswith(f"removed {left}: ") and "cut short" in said[0])

    assert store.save(3, restored.state, IDENTITY)
    store.wait()
    assert {path.name for path in store.folder.iterdir()} == {"3"}
