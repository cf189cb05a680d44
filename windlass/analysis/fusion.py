"""Fusion: the memory traffic between matmuls, once a compiler has fused what lies between them."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

Amount = int | float


@dataclasses.dataclass(eq=False)
class Value:
    """A per-device array of a program."""

    elements: Amount
    itemsize: int
    axes: frozenset[str] = frozenset()  # of the mesh, that it is sharded over

    @property
    def bytes(self) -> Amount:
        return self.elements * self.itemsize


@dataclasses.dataclass(eq=False)
class Node:
    """An operation of a region, or a kernel of its own."""

    name: str
    reads: list[Value]
    writes: list[Value]
    part: str  # of the step
    is_unfused: bool = False  # fused with nothing around it
    is_reduced: bool = False  # its readers wait for all of its result
    is_slice: bool = False  # reads only as much as it writes
    is_matmul: bool = False
    is_scaling: bool = False
    own: Amount = 0.0  # bytes of traffic, as a kernel of its own
    operations: Amount = 0.0  # of vector units
    is_auto: bool = False  # the compiler chooses its sharding
    record: object = None  # a matmul, an attention call or a collective of the cost model
    partial_axes: Sequence[str] = ()  # of the mesh, over which its result is a partial sum


def live(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Node]:
    """Dead code elimination: the nodes that an output depends on."""
    needed, alive = set(map(id, outputs)), []
    for node in reversed(nodes):
        if any(id(value) in needed for value in node.writes):
            needed.update(map(id, node.reads))
            alive.append(node)
    return alive[::-1]


def traffic(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    sliced: Sequence[Value] = (),
    stacked: Sequence[Value] = (),
    fuses_epilogues: bool,
) -> dict[str, Amount]:
    """Memory traffic of the nodes of a region in bytes, by part of the step.

    In memory are inputs and outputs, what unfused kernels read and write, and what reductions give.
    All else is fused: everything in memory is read once by the kernels that can run at the same
    time, and written once.

    `fuses_epilogues`: the compiler computes what follows a matmul in the same kernel. One that does
    not also copies what a loop slices for a matmul (`sliced`), or stacks from matmuls (`stacked`).
    """
    nodes = _accumulated(nodes, outputs)
    in_memory = {id(value) for value in (*inputs, *outputs)}
    for node in nodes:
        if node.is_unfused:
            in_memory.update(map(id, node.reads))
        if node.is_reduced or node.is_unfused and not (node.is_matmul and fuses_epilogues):
            in_memory.update(map(id, node.writes))
    # What several kernels read is materialised where that is cheaper than to recompute it.
    first = _Kernels(nodes, in_memory)
    moved = dict(_Kernels(nodes, in_memory | first.worth_keeping()).moved())
    if not fuses_epilogues:
        for part, size in _copies(nodes, inputs, sliced, stacked).items():
            moved[part] = moved.get(part, 0.0) + size
    return moved


class _Kernels:
    """The kernels of a region, given what is in memory between them.

    A kernel has a level, one more than those whose results it reads.
    """

    def __init__(self, nodes: Sequence[Node], in_memory: set[int]):
        self.nodes, self.in_memory = nodes, in_memory
        self.sources: dict[int, dict[int, tuple[Value, Amount]]] = {}
        self.level: dict[int, int] = defaultdict(int)
        self.levels = [self.follow(node) for node in nodes]

    def follow(self, node: Node) -> int:
        sources: dict[int, tuple[Value, Amount]] = {}
        most = max((value.elements for value in node.writes), default=0.0)
        for value in node.reads:
            for key, (source, elements) in self.behind(value).items():
                elements = min(elements, most) if node.is_slice else elements
                if key not in sources or sources[key][1] < elements:
                    sources[key] = (source, elements)
        level = 1 + max((self.level[key] for key in sources), default=0)
        for value in node.writes:
            self.sources[id(value)] = {} if node.is_unfused else sources
            self.level[id(value)] = level
        return level

    def behind(self, value: Value) -> dict[int, tuple[Value, Amount]]:
        """Arrays in memory that a value is computed from, and the elements read of each."""
        if id(value) in self.in_memory:
            return {id(value): (value, value.elements)}
        return self.sources.get(id(value), {})

    def worth_keeping(self) -> set[int]:
        """Values that kernels of several levels compute, each from more than the value's bytes."""
        users: dict[int, set[int]] = defaultdict(set)
        for node, level in reversed(list(zip(self.nodes, self.levels, strict=True))):
            own = {level} if node.is_unfused else set[int]()
            for value in node.writes:
                own |= {level} if id(value) in self.in_memory else users[id(value)]
            for value in node.reads:
                users[id(value)] |= own
        return {
            id(value)
            for node in self.nodes
            for value in node.writes
            if len(users[id(value)]) > 1 and _size(self.behind(value)) > value.bytes
        }

    def moved(self) -> dict[str, Amount]:
        moved: dict[str, Amount] = defaultdict(float)
        reads: dict[tuple[int, int], tuple[Amount, str]] = {}
        for node, level in zip(self.nodes, self.levels, strict=True):
            if node.is_unfused:
                moved[node.part] += node.own
                continue
            for value in node.writes:
                if id(value) not in self.in_memory:
                    continue
                moved[node.part] += value.bytes
                for key, (source, elements) in self.sources[id(value)].items():
                    size = min(elements, source.elements) * source.itemsize
                    before, part = reads.get((key, level), (0.0, node.part))
                    reads[key, level] = (max(before, size), part)
        for size, part in reads.values():
            moved[part] += size
        return moved


def _accumulated(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Node]:
    """The nodes, with the sum of a matmul and another array as the epilogue of the matmul."""
    readers = Counter(id(value) for node in nodes for value in node.reads)
    readers.update(map(id, outputs))
    alone = {
        id(value)
        for node in nodes
        if node.is_matmul
        for value in node.writes
        if readers[id(value)] == 1
    }
    fused = []
    for node in nodes:
        factors = [value for value in node.reads if value.elements <= 1]
        if node.name == "mul" and factors and any(id(value) in alone for value in node.reads):
            alone.update(id(value) for value in node.writes if readers[id(value)] == 1)
        terms = [value for value in node.reads if id(value) not in alone]
        if node.name in ("add", "add_any") and len(terms) == 1 and terms[0].elements > 1:
            node = dataclasses.replace(node, is_unfused=True, is_matmul=True, own=terms[0].bytes)
        fused.append(node)
    return fused


def _size(sources: dict[int, tuple[Value, Amount]]) -> Amount:
    return sum(elements * source.itemsize for source, elements in sources.values())


def _copies(nodes, inputs, sliced, stacked) -> dict[str, Amount]:
    """Copies for library kernels, which cannot read a slice or write into a stack in place."""
    out = {id(value) for value in inputs}
    out.update(id(value) for node in nodes if node.is_matmul for value in node.writes)
    into = {id(value) for node in nodes if node.is_matmul for value in node.reads}
    copied = [value for value in stacked if id(value) in out]
    copied += [value for value in sliced if id(value) in into]
    return {nodes[0].part: 2 * sum(value.bytes for value in copied)} if copied else {}
