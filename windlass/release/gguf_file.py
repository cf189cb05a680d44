"""GGUF files, written a tensor at a time; their size is known before they are."""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import UserError
from windlass.release import gguf_types
from windlass.release.low_bit import StoredBits

EXTRA = "pip install 'windlass-lm[gguf]'"


class GgufTensor(NamedTuple):
    """Tensor to be written in a GGML type; it is read when its turn comes, and quantized."""

    name: str
    shape: tuple[int, ...]
    kind: str  # of gguf.GGMLQuantizationType
    read: Callable[[], np.ndarray]
    on_grid: bool = False  # its numbers are of the type's grid already

    @property
    def size(self) -> int:
        return gguf_types.size(self.kind, self.shape)

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    def bytes(self) -> np.ndarray:
        x = self.read().astype(np.float32, copy=False)
        return gguf_types.quantized(x, self.kind, self.name, on_grid=self.on_grid)


class GgufFile(NamedTuple):
    """A header, which describes the tensors, and then their bytes, each aligned."""

    name: str
    header: bytes
    tensors: Sequence[GgufTensor]

    @property
    def size(self) -> int:
        return len(self.header) + sum(_aligned(tensor.size) for tensor in self.tensors)

    def write(self, folder: Path, tell: Callable[[int], None] = lambda size: None) -> None:
        """Write the file; `tell` is called with the bytes of each tensor as they are written."""
        with (folder / self.name).open("wb") as out:
            out.write(self.header)
            tell(len(self.header))
            for tensor in self.tensors:
                out.write(tensor.bytes().reshape(-1).view(np.uint8).data)
                out.write(bytes(_aligned(tensor.size) - tensor.size))
                tell(_aligned(tensor.size))

    @property
    def bits(self) -> StoredBits:
        """Bits of the linear maps: all matrices but the embedding and the head."""
        some = [one for one in self.tensors if is_map(one)]
        return StoredBits(8 * sum(one.size for one in some), sum(one.parameters for one in some))


def made(
    name: str, architecture: str, describe: Callable[[Any], None], tensors: Sequence[GgufTensor]
) -> GgufFile:
    """A file of tensors; `describe(writer)` adds the keys to gguf's own writer."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.gguf_writer import WriterState

    writer: Any = GGUFWriter(None, architecture)
    describe(writer)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        # Of a type that has no dtype of numpy's, the shape is given in bytes otherwise.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, kind)
    out = BytesIO()
    writer.fout, writer.state = [out], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = out.getvalue()
    return GgufFile(name, header + bytes(_aligned(len(header)) - len(header)), tensors)


def check_installed() -> None:
    """Refuse, before anything is written, where the package is missing."""
    if find_spec("gguf") is None:
        raise UserError(
            f"GGUF files are written with the package gguf, which is not installed; `{EXTRA}` "
            "installs it"
        )


def is_map(tensor: GgufTensor) -> bool:
    return len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight")


def _aligned(size: int) -> int:
    from gguf import GGUF_DEFAULT_ALIGNMENT

    return -(-size // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT
