import subprocess
import sys

# In a process of its own: once found, a module is not looked for again.
LOWERED = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton  # noqa: F401  who imports more than is needed

looked = []


class Finder:
    def find_spec(self, name, path=None, target=None):
        looked.append(name)


sys.meta_path.insert(0, Finder())
from windlass.devices.triton import called


def double(x, out):
    out[...] = 2 * x[...]


x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
lowered = jax.jit(called(double, out_shape=x)).trace(x).lower(lowering_platforms=("cuda",))
assert "double" in lowered.as_text()
print(len([name for name in looked if name.startswith("jaxlib.mlir.dialects.tt")]))
"""


def test_mlir_does_not_look_for_the_dialect_of_triton_in_all_folders():
    done = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]
