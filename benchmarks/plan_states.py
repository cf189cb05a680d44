"""What the recipes that ship store on each device: by a plan, and by XLA for CPUs."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

DEVICES = 8
FLAGS = os.environ.get("XLA_FLAGS", "")
if "device_count" not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count={DEVICES}"

from tests.hub.published import QWEN2_5_0_5B  # noqa: E402
from windlass.config import load, shipped  # noqa: E402
from windlass.planning import memory, targets, traced  # noqa: E402
from windlass.program.built import Built  # noqa: E402
from windlass.program.programs import RUN_ONCE, Programs  # noqa: E402
from windlass.starting.describe import describe  # noqa: E402

MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2)]


def states() -> Iterator[tuple[str, tuple[int, int, int], int, int]]:
    """A recipe, its mesh, and bytes on each device: planned, and as compiled."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(QWEN2_5_0_5B)
        model = [f"model.path={folder}", "model.hub=null", "tokenizer.kind=byte"]
        for name in shipped():
            recipe = load(name).merged(None)
            train = recipe["train"]
            rows = max(train["batch"], 8 * train.get("accumulation", 1))  # one for each device
            keys = [f"train.batch={rows}", *(model if "hub" in recipe["model"] else [])]
            for mesh in MESHES:
                yield name, mesh, *_state(name, mesh, keys)


def _state(name: str, mesh: tuple[int, int, int], keys: list[str]) -> tuple[int, int]:
    count = 8 if mesh != (1, 1, 1) else 1
    sizes = zip(("data", "fsdp", "tensor"), mesh, strict=True)
    keys = [*keys, *(f"mesh.{axis}={size}" for axis, size in sizes)]
    described = describe(name, [*keys, "device=cpu", f"device.count={count}"])
    here = targets.of(described.devices)
    with described.scope():
        programs = Programs(Built(described), 1000)
        compiled = (
            programs.step().lower(*programs.abstract_call()).compile(compiler_options=RUN_ONCE)
        )
    found = compiled.memory_analysis()
    assert found is not None
    planned = memory.stored(traced.trace(described, here))
    return sum(planned.values()), found.argument_size_in_bytes
