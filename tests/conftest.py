"""Eight simulated devices, checked shapes, strict types: what every test runs under."""

import ctypes
import gc
import importlib.util
import os
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flags import quick

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick(devices=8)}"
# One folder for all processes that tests start. It holds code, so it is the user's alone.
compiled = Path(tempfile.gettempdir()) / f"windlass-tests-{os.getuid()}"
compiled.mkdir(mode=0o700, exist_ok=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads them here
gc.set_threshold(100_000, 20, 50)  # a trace makes millions of objects, hardly one of them garbage

if importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    # Where shapes are declared. Everywhere else each call would cost ten times its work, for what
    # the type checker knows without a run.
    root = Path(__file__).parents[1]
    shaped = [
        str(file.relative_to(root).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for file in (root / "windlass").rglob("*.py")
        if re.search(r"\b(Bool|Float|Int|Num|Shaped|UInt)\[", file.read_text())
    ]
    install_import_hook(shaped, "beartype.beartype")

import jax  # noqa: E402

import tests.strangers  # noqa: E402, F401  found as what ships is: by being in the folder
import windlass.models  # noqa: E402
from tests import tiny  # noqa: E402
from windlass.devices import selection  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Programs here are of several devices: read from the cache, XLA would abort (compile_cache.keep).
jax.config.update("jax_enable_compilation_cache", False)
selection.present()  # JAX starts

LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
# Of layers that others have, in another order or with other constants.
LIKE_OTHERS = (
    *("granite", "olmo2", "olmo3", "phi3", "smollm3"),
    *("gpt_oss", "qwen3_5_moe", "qwen3_moe"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc):
    """`family` is each of them in turn, `causal` each of those that declare themselves so.

    `bidirectional` is each of the others.
    Of the families that ship one is among the quick tests and of the strangers the recurrent one,
    the others are long: tests/models/test_parity.py has every family that ships.
    For what takes longer, `shipped` is each that ships and is not of llama's blocks, with those
    among the long whose layers another has, and `unlike` a recurrent one as well: other tests train
    llama's, and every stranger.
    """
    shipped = {module.name for module in pkgutil.iter_modules(windlass.models.__path__[:1])}
    found = sorted(module.name for module in pkgutil.iter_modules(windlass.models.__path__))

    def tiered(names: list[str]) -> list:
        quick, long = ("gru", "qwen3"), pytest.mark.long
        return [name if name in quick else pytest.param(name, marks=long) for name in names]

    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", tiered(found))
    if "unlike" in metafunc.fixturenames:
        others = sorted(shipped - {*LIKE_LLAMA})
        long = [pytest.param(name, marks=pytest.mark.long) for name in others]
        metafunc.parametrize("unlike", ["gru", *long])
    if "shipped" in metafunc.fixturenames:
        own = sorted(shipped - {*LIKE_LLAMA, *LIKE_OTHERS})
        like = sorted(shipped & {*LIKE_OTHERS})
        long = [pytest.param(name, marks=pytest.mark.long) for name in like]
        metafunc.parametrize("shipped", [*own, *long])
    if "causal" in metafunc.fixturenames:
        declared = [name for name in found if tiny.config(name).causal]
        metafunc.parametrize("causal", tiered(declared))
    if "bidirectional" in metafunc.fixturenames:
        others = [name for name in found if not tiny.config(name).causal]
        metafunc.parametrize("bidirectional", others)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared data goes, instead of the user's home."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["WINDLASS_CACHE"] = str(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def bounded() -> Iterator[None]:
    """Programs that earlier modules compiled are dropped before the workers fill the machine."""
    yield
    if psutil.Process().memory_info().rss > 4 * 2**30:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what is freed
            trim(0)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of its own for a run, which the test stands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
