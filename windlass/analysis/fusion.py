"""Bytes that cross memory between matrix products, once a compiler has fused what lies between."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

Amount = int | float


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program, as one device holds it."""

    elements: Amount
    itemsize: int
    axes: frozenset[str] = frozenset()  # of the mesh, that it is split over

    @property
    def bytes(self) -> Amount:
        return self.elements * self.itemsize


@dataclasses.dataclass(eq=False)
class Node:
    """An operation of a program, or a call of something that is a kernel of its own."""

    name: str
    reads: list[Value]
    writes: list[Value]
    part: str  # of the step
    is_apart: bool = False  # fused with nothing around it
    is_reduced: bool = False  # whoever wants its result waits until all of it is there
    is_cut: bool = False  # reads only as much as it writes
    is_product: bool = False
    is_scaling: bool = False
    own: Amount = 0.0  # bytes that it moves as a kernel of its own
    operations: Amount = 0.0  # on single numbers
    is_free: bool = False  # the compiler chooses which device computes which piece of it
    record: object = None  # what else is to be told of it
    summed: Sequence[str] = ()  # axes of the mesh over which devices have a part of its result


def live(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Node]:
    """The nodes that something depends on."""
    wanted, kept = set(map(id, outputs)), []
    for node in reversed(nodes):
        if any(id(value) in wanted for value in node.writes):
            wanted.update(map(id, node.reads))
            kept.append(node)
    return kept[::-1]


def traffic(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    sliced: Sequence[Value] = (),
    stacked: Sequence[Value] = (),
    fuses_products: bool,
) -> dict[str, Amount]:
    """Bytes that the nodes of a straight program move, by part of the step.

    In memory are what goes in and out, what kernels of their own read and write, and what is
    reduced. All else is computed on the way: everything in memory is read once by the kernels that
    can run at the same time, and written once.

    `fuses_products`: a compiler that computes what follows a product in the same kernel. One that
    does not also copies what a loop cuts for a product (`sliced`), or puts together from products
    (`stacked`).
    """
    nodes = _accumulated(nodes, outputs)
    in_memory = {id(value) for value in (*inputs, *outputs)}
    for node in nodes:
        if node.is_apart:
            in_memory.update(map(id, node.reads))
        if node.is_reduced or node.is_apart and not (node.is_product and fuses_products):
            in_memory.update(map(id, node.writes))
    # What several kernels want is kept where that is cheaper than to compute it again.
    first = _Kernels(nodes, in_memory)
    moved = dict(_Kernels(nodes, in_memory | first.dear()).moved())
    if not fuses_products:
        for part, size in _copies(nodes, inputs, sliced, stacked).items():
            moved[part] = moved.get(part, 0.0) + size
    return moved


class _Kernels:
    """The kernels of a straight program, given what is in memory between them.

    A kernel has a level, one more than those whose results it reads.
    """

    def __init__(self, nodes: Sequence[Node], in_memory: set[int]):
        self.nodes, self.in_memory = nodes, in_memory
        self.sources: dict[int, dict[int, tuple[Value, Amount]]] = {}
        self.level: dict[int, int] = defaultdict(int)
        self.levels = [self.follow(node) for node in nodes]

    def follow(self, node: Node) -> int:
        found: dict[int, tuple[Value, Amount]] = {}
        most = max((value.elements for value in node.writes), default=0.0)
        for value in node.reads:
            for key, (source, elements) in self.behind(value).items():
                elements = min(elements, most) if node.is_cut else elements
                if key not in found or found[key][1] < elements:
                    found[key] = (source, elements)
        level = 1 + max((self.level[key] for key in found), default=0)
        for value in node.writes:
            self.sources[id(value)] = {} if node.is_apart else found
            self.level[id(value)] = level
        return level

    def behind(self, value: Value) -> dict[int, tuple[Value, Amount]]:
        """What is read from memory, and how much of it, for a value."""
        if id(value) in self.in_memory:
            return {id(value): (value, value.elements)}
        return self.sources.get(id(value), {})

    def dear(self) -> set[int]:
        """Values that kernels of several levels compute, each from more than the value's bytes."""
        wanted: dict[int, set[int]] = defaultdict(set)
        for node, level in reversed(list(zip(self.nodes, self.levels, strict=True))):
            own = {level} if node.is_apart else set[int]()
            for value in node.writes:
                own |= {level} if id(value) in self.in_memory else wanted[id(value)]
            for value in node.reads:
                wanted[id(value)] |= own
        return {
            id(value)
            for node in self.nodes
            for value in node.writes
            if len(wanted[id(value)]) > 1 and _size(self.behind(value)) > value.bytes
        }

    def moved(self) -> dict[str, Amount]:
        moved: dict[str, Amount] = defaultdict(float)
        reads: dict[tuple[int, int], tuple[Amount, str]] = {}
        for node, level in zip(self.nodes, self.levels, strict=True):
            if node.is_apart:
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
    """The nodes, with a sum of a product and something else in the kernel of the product."""
    readers = Counter(id(value) for node in nodes for value in node.reads)
    readers.update(map(id, outputs))
    alone = {
        id(value)
        for node in nodes
        if node.is_product
        for value in node.writes
        if readers[id(value)] == 1
    }
    found = []
    for node in nodes:
        factors = [value for value in node.reads if value.elements <= 1]
        if node.name == "mul" and factors and any(id(value) in alone for value in node.reads):
            alone.update(id(value) for value in node.writes if readers[id(value)] == 1)
        terms = [value for value in node.reads if id(value) not in alone]
        if node.name in ("add", "add_any") and len(terms) == 1 and terms[0].elements > 1:
            node = dataclasses.replace(node, is_apart=True, is_product=True, own=terms[0].bytes)
        found.append(node)
    return found


def _size(sources: dict[int, tuple[Value, Amount]]) -> Amount:
    return sum(elements * source.itemsize for source, elements in sources.values())


def _copies(nodes, inputs, sliced, stacked) -> dict[str, Amount]:
    """What kernels that are not the compiler's own cannot read or write in place."""
    out = {id(value) for value in inputs}
    out.update(id(value) for node in nodes if node.is_product for value in node.writes)
    into = {id(value) for node in nodes if node.is_product for value in node.reads}
    copied = [value for value in stacked if id(value) in out]
    copied += [value for value in sliced if id(value) in into]
    return {nodes[0].part: 2 * sum(value.bytes for value in copied)} if copied else {}
