"""Cost model: FLOPs, memory traffic and collectives of a step on one device, from its jaxpr."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from windlass.analysis import per_device
from windlass.analysis.fusion import Amount, Node, Value, live, traffic
from windlass.analysis.primitives import Kind, primitive
from windlass.analysis.region import Region
from windlass.analysis.work import AttentionCall, Collective, Matmul, Work


def read(
    program: Jaxpr, split: dict[str, int], *, vocab: int | None, fuses_epilogues: bool
) -> Work:
    """The work of a step's program on one device of a mesh of this shape."""
    reader = _Reader(vocab, fuses_epilogues=fuses_epilogues)
    inputs = [per_device.value(variable) for variable in program.invars]
    reader.region(program, inputs, 1.0, "optimiser")
    return reader.work(split)


class _Reader:
    """The cost model of a program, region by region: a body of a loop is one, a call is inlined."""

    def __init__(self, vocab: int | None, *, fuses_epilogues: bool):
        self.vocab, self.fuses_epilogues = vocab, fuses_epilogues
        self.matmuls: list[Matmul] = []
        self.attention: list[AttentionCall] = []
        self.collectives: list[Collective] = []
        self.traffic: dict[str, Amount] = {}
        self.operations: dict[str, Amount] = {}
        self.rounds: Amount = 0.0

    def work(self, split: dict[str, int]) -> Work:
        trivial = {axis for axis, ways in split.items() if ways == 1}
        collectives = [
            one._replace(axes=tuple(a for a in one.axes if a not in trivial))
            for one in self.collectives
        ]
        collectives = [one for one in collectives if one.axes and one.moved]
        counted = (self.traffic, self.operations, self.rounds)
        return Work(self.matmuls, self.attention, collectives, *counted)

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
        """Add the work of a program that runs `times` over: the step, or the body of a loop."""
        if part == "elementwise" and self.has_vocab_axis(program):
            part = "head"
        self.rounds += times if is_round else 0.0
        region = Region(
            program,
            inputs,
            part,
            times=times,
            vocab=self.vocab,
            fuses_epilogues=self.fuses_epilogues,
            inner=self.region,
        )
        outputs = region.outputs
        nodes = live(region.nodes, outputs)
        _divide(nodes, outputs)
        self.add(nodes, times)
        moved = traffic(
            nodes,
            inputs,
            outputs,
            sliced=[inputs[i] for i in sliced],
            stacked=[outputs[i] for i in stacked],
            fuses_epilogues=self.fuses_epilogues,
        )
        for name, size in moved.items():
            self.traffic[name] = self.traffic.get(name, 0.0) + times * size

    def add(self, nodes: list[Node], times: Amount) -> None:
        readers: dict[int, list[Node]] = {}
        for node in nodes:
            for value in node.reads:
                readers.setdefault(id(value), []).append(node)
        known: set[tuple] = set()
        _add_up(nodes, readers)
        for node in nodes:
            match node.record:
                case Matmul():
                    self.matmuls.append(node.record)
                case AttentionCall():
                    self.attention.append(node.record)
                case Collective():
                    # Common subexpressions are eliminated: a collective of the same array is one.
                    if (same := (id(node.reads[0]), node.record)) not in known:
                        self.collectives.append(node.record)
                    known.add(same)
            done = times * node.operations
            self.operations[node.part] = self.operations.get(node.part, 0.0) + done
            if node.partial_axes:
                self.collectives += _sums(node, readers, times)

    def has_vocab_axis(self, program: Jaxpr) -> bool:
        """Return True if logits are computed here, and not only in calls or bodies of loops."""
        dots = [e for e in program.eqns if primitive(e).kind is Kind.MATMUL]
        shapes = [per_device.shape(v) for e in dots for v in (*e.invars, *e.outvars)]
        return any(per_device.has_vocab_axis(shape, self.vocab) for shape in shapes)


def _divide(nodes: list[Node], outputs: list[Value]) -> None:
    """Scale the operations on arrays that the compiler shards to the shard that a device needs: of
    random numbers, say, those of its own part of the batch."""
    needed: dict[int, Amount] = dict.fromkeys(map(id, outputs), 1.0)
    for node in reversed(nodes):
        share = max(needed.get(id(value), 0.0) for value in node.writes) if node.is_auto else 1.0
        node.operations *= share
        size = node.writes[0].elements
        for value in node.reads:
            is_alike = node.is_auto and value.elements == size
            piece = size / value.elements if node.name == "reshard" and value.elements else 1.0
            of_it = share if is_alike else min(1.0, piece)
            needed[id(value)] = max(needed.get(id(value), 0.0), of_it)


def _add_up(nodes: list[Node], readers: dict[int, list[Node]]) -> None:
    """Move all-reduces behind sums of their results: one of the sum instead of one of each term."""
    makers = {id(value): node for node in nodes for value in node.writes}
    for node in nodes:
        if node.name not in ("add", "add_any"):
            continue
        terms = [makers[id(value)] for value in node.reads if id(value) in makers]
        axes = {tuple(term.partial_axes) for term in terms}
        alone = all(len(readers[id(value)]) == 1 for value in node.reads)
        if len(terms) == len(node.reads) and len(axes) == 1 and alone:
            (node.partial_axes,) = axes
            for term in terms:
                term.partial_axes = ()


def _sums(node: Node, readers: dict[int, list[Node]], times: Amount) -> list[Collective]:
    """The collectives of a partial sum: a reduce-scatter where a shard is needed, or all-reduce."""
    value, scattered = node.writes[0], frozenset[str]()
    while len(users := readers.get(id(value), [])) == 1:
        (reader,) = users
        if reader.name == "reshard":
            scattered = reader.writes[0].axes - reader.reads[0].axes
            break
        # A reduce-scatter may as well come after a scaling.
        if not reader.is_scaling:
            break
        value = reader.writes[0]
    over = [axis for axis in node.partial_axes if axis not in scattered]
    pieces = [axis for axis in node.partial_axes if axis in scattered]
    moved, collectives = node.writes[0].bytes, []
    if pieces:
        collectives.append(Collective("reduce-scatter", tuple(pieces), moved, times, node.part))
    if over:
        share = reader.writes[0].elements / reader.reads[0].elements if pieces else 1.0
        collectives.append(Collective("all-reduce", tuple(over), moved * share, times, node.part))
    return collectives
