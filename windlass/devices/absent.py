"""Abstract devices, which are not here: enough of each to lay a run out and to trace it."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from windlass.devices.mesh import axes


@dataclass(frozen=True)
class Absent:
    """An abstract device by the catalogue, in the place of one of JAX's."""

    platform: str  # tpu, gpu or cpu
    device_kind: str  # JAX's name of it
    slice_index: int = 0  # of the devices that links join
    process_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)  # of its chip in the slice
    core_on_chip: int = 0
    id: int = 0  # JAX's number of it


def mesh(split: Mapping[str, int], device: Absent) -> AbstractMesh:
    """The abstract mesh of such devices: programs can be traced on it, and not compiled."""
    return AbstractMesh(
        tuple(split[name] for name in axes(split)),
        axes(split),
        axis_types=(AxisType.Explicit,) * len(axes(split)),
        abstract_device=AbstractDevice(device.device_kind, None, device.platform),
    )


NO_MESH = AbstractMesh((), ())
