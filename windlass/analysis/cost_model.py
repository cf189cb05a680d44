"""What one device computes, moves and says to others in a step, read from the step's program."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from windlass.analysis import per_device
from windlass.analysis.fusion import Amount, Node, Value, live, traffic
from windlass.analysis.primitives import Kind, primitive
from windlass.analysis.region import Region
from windlass.analysis.work import Attention, Collective, Product, Work


def read(program: Jaxpr, split: dict[str, int], *, vocab: int | None, fuses_products: bool) -> Work:
    """The work of a step's program on one device of a mesh that is split so."""
    reader = _Reader(vocab, fuses_products=fuses_products)
    inputs = [per_device.value(variable) for variable in program.invars]
    reader.region(program, inputs, 1.0, "optimiser")
    return reader.work(split)


class _Reader:
    """Reads a program by regions: a loop's body is one of its own, a called function is not."""

    def __init__(self, vocab: int | None, *, fuses_products: bool):
        self.vocab, self.fuses_products = vocab, fuses_products
        self.products: list[Product] = []
        self.attention: list[Attention] = []
        self.collectives: list[Collective] = []
        self.moved: dict[str, Amount] = {}
        self.operations: dict[str, Amount] = {}
        self.rounds: dict[str, Amount] = {}

    def work(self, split: dict[str, int]) -> Work:
        alone = {axis for axis, ways in split.items() if ways == 1}
        said = [
            one._replace(axes=tuple(a for a in one.axes if a not in alone))
            for one in self.collectives
        ]
        said = [one for one in said if one.axes and one.moved]
        counted = (self.moved, self.operations, self.rounds)
        return Work(self.products, self.attention, said, *counted)

    def region(
        self,
        program: Jaxpr,
        inputs: list[Value],
        times: Amount,
        part: str,
        *,
        is_round: bool = False,
        sliced: Sequence[int] = (),
        stacked: Sequence[int] = (),
    ) -> None:
        """Read what is done `times` over; each round of a loop has own inputs and outputs."""
        if part == "elementwise" and self.has_words(program):
            part = "head"
        self.rounds[part] = self.rounds.get(part, 0.0) + (times if is_round else 0.0)
        region = Region(program, inputs, part, times=times, vocab=self.vocab, inner=self.region)
        outputs = region.outputs
        nodes = live(region.nodes, outputs)
        _divide(nodes, outputs)
        self.tell(nodes, times)
        moved = traffic(
            nodes,
            inputs,
            outputs,
            sliced=[inputs[i] for i in sliced],
            stacked=[outputs[i] for i in stacked],
            fuses_products=self.fuses_products,
        )
        for name, size in moved.items():
            self.moved[name] = self.moved.get(name, 0.0) + times * size

    def tell(self, nodes: list[Node], times: Amount) -> None:
        readers: dict[int, list[Node]] = {}
        for node in nodes:
            for value in node.reads:
                readers.setdefault(id(value), []).append(node)
        told: set[tuple] = set()
        _add_up(nodes, readers)
        for node in nodes:
            match node.record:
                case Product():
                    self.products.append(node.record)
                case Attention():
                    self.attention.append(node.record)
                case Collective():
                    # The compiler does once what the program asks for twice.
                    if (same := (id(node.reads[0]), node.record)) not in told:
                        self.collectives.append(node.record)
                    told.add(same)
            done = times * node.operations
            self.operations[node.part] = self.operations.get(node.part, 0.0) + done
            if node.summed:
                self.collectives += _sums(node, readers, times)

    def has_words(self, program: Jaxpr) -> bool:
        """Whether logits are computed here, and not only in what is called or repeated."""
        dots = [e for e in program.eqns if primitive(e).kind is Kind.MATMUL]
        shapes = [per_device.shape(v) for e in dots for v in (*e.invars, *e.outvars)]
        return any(per_device.is_of_words(shape, self.vocab) for shape in shapes)


def _divide(nodes: list[Node], outputs: list[Value]) -> None:
    """Count of what the compiler may divide only the piece that each device wants: of random
    numbers, say, which are drawn for the rows that it has."""
    wanted: dict[int, Amount] = dict.fromkeys(map(id, outputs), 1.0)
    for node in reversed(nodes):
        share = max(wanted.get(id(value), 0.0) for value in node.writes) if node.is_free else 1.0
        node.operations *= share
        size = node.writes[0].elements
        for value in node.reads:
            is_alike = node.is_free and value.elements == size
            piece = size / value.elements if node.name == "reshard" and value.elements else 1.0
            of_it = share if is_alike else min(1.0, piece)
            wanted[id(value)] = max(wanted.get(id(value), 0.0), of_it)


def _add_up(nodes: list[Node], readers: dict[int, list[Node]]) -> None:
    """Move sums over devices behind the sums of what they give: devices speak once of all terms."""
    made = {id(value): node for node in nodes for value in node.writes}
    for node in nodes:
        if node.name not in ("add", "add_any"):
            continue
        terms = [made[id(value)] for value in node.reads if id(value) in made]
        axes = {tuple(term.summed) for term in terms}
        alone = all(len(readers[id(value)]) == 1 for value in node.reads)
        if len(terms) == len(node.reads) and len(axes) == 1 and alone:
            (node.summed,) = axes
            for term in terms:
                term.summed = ()


def _sums(node: Node, readers: dict[int, list[Node]], times: Amount) -> list[Collective]:
    """What devices say to each other that each have a part of a sum."""
    value, wanted = node.writes[0], frozenset[str]()
    while len(found := readers.get(id(value), [])) == 1:
        (reader,) = found
        if reader.name == "reshard":
            wanted = reader.writes[0].axes - reader.reads[0].axes
            break
        # A sum over devices, of which each wants a piece, may as well be taken after a scaling.
        if not reader.is_scaling:
            break
        value = reader.writes[0]
    over = [axis for axis in node.summed if axis not in wanted]
    pieces = [axis for axis in node.summed if axis in wanted]
    moved, found = node.writes[0].bytes, []
    if pieces:
        found.append(Collective("scatter", tuple(pieces), moved, times, node.part))
    if over:
        share = reader.writes[0].elements / reader.reads[0].elements if pieces else 1.0
        found.append(Collective("sum", tuple(over), moved * share, times, node.part))
    return found
