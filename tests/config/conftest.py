"""A small run to read: sections as the package has them, and an open set of two files."""

import sys
from typing import Annotated, Any, ClassVar, Literal

import pytest

from windlass.config import Open, section
from windlass.errors import UserError

FAMILY = '''
from windlass.config import section


@section
class Config:
    """A family of toys."""

    layers: int  # how deep it is
    theta: float  # the rotary base
'''


@section
class Device:
    """The accelerator."""

    shorthand: ClassVar[str] = "kind"

    kind: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    count: int | None = None


@section
class Optimizer:
    """A toy optimiser."""

    learning_rate: float  # at its peak
    # the last part of the run,
    # down to zero
    decay_fraction: float = 0.2
    name: str = "a # b"
    clip_norm: float | None = 1.0  # null: no clipping

    def __post_init__(self):
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction is {self.decay_fraction}; it is a share, 0 to 1")


@section
class Train:
    """How long, and how much at a time."""

    batch: int = 8
    steps: int = 100
    strict: bool = False
    patterns: tuple[str, ...] = ()
    rows: int | Literal["auto"] = "auto"


@section
class Part:
    path: str
    weight: float = 1.0


@section
class Empty:
    """A section that has nothing to set."""


@section
class Run:
    """A toy run."""

    model: Annotated[Any, Open("toys", tag="family", attribute="Config")]
    optim: Optimizer
    train: Train = Train()
    device: Device = Device()
    parts: tuple[Part, ...] = ()
    teacher: Part | None = None
    weights: dict[str, float] | None = None
    empty: Empty = Empty()

    def __post_init__(self):
        if self.teacher is not None and self.parts:
            raise ValueError("a teacher and parts exclude each other")


WHOLE = {"model": {"family": "qwen3", "layers": 2, "theta": 1e4}, "optim": {"learning_rate": 1e-3}}


@pytest.fixture(scope="session", autouse=True)
def toys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open") / "toys"
    folder.mkdir()
    for name in ("__init__", "_private", "llama", "qwen3"):
        (folder / f"{name}.py").write_text("" if name.startswith("_") else FAMILY)
    sys.path.insert(0, str(folder.parent))
    yield
    sys.path.remove(str(folder.parent))


@pytest.fixture
def run():
    return Run


@pytest.fixture
def whole():
    return WHOLE


@pytest.fixture
def refusal():
    """Calls something that is to be refused, and returns the message."""

    def call(function, *args, **options) -> str:
        with pytest.raises(UserError) as refused:
            function(*args, **options)
        return str(refused.value)

    return call
