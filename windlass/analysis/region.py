"""The operations of a straight part of a program, as what one device does of each."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from windlass.analysis import per_device
from windlass.analysis.flops import constants_and_carried, programs
from windlass.analysis.fusion import Amount, Node, Value
from windlass.analysis.work import Attention, Collective, Product
from windlass.layers.pattern import Pattern
from windlass.program.step import MICROBATCH

# What gives its argument another shape or name. A product takes axes in any order, so that one
# that is transposed for it costs nothing.
_RENAMED = frozenset(
    "reshape transpose squeeze expand_dims copy copy_p name stop_gradient pvary pbroadcast".split()
)
_CALLED = frozenset(
    "jit pjit closed_call core_call remat2 remat checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr shard_map".split()
)
_CUT = frozenset("gather slice dynamic_slice".split())
_REDUCED = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split()
)
_APART = frozenset(
    "sort scatter scatter-add scatter_add scatter-mul scatter-min scatter-max top_k cumsum cumprod "
    "cummax cumlogsumexp reduce_window conv_general_dilated pallas_call while cond "
    "dynamic_update_slice fft cholesky triangular_solve qr eigh svd".split()
)
_LAID_OUT = frozenset(
    "broadcast_in_dim iota concatenate pad gather slice dynamic_slice rev".split()
)
# What takes longer than a sum does. Random bits are by threefry: for each number twenty rounds of
# five operations, and keys that are added between them.
_LONG: dict[str, int] = dict.fromkeys(
    "exp exp2 log log1p expm1 tanh logistic rsqrt sqrt sin cos div erf".split(), 4
)
_LONG |= {"pow": 8, "random_bits": 115, "threefry2x32": 115}
_TOGETHER = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "sum",
    "pmin": "sum",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "exchange",
    "ppermute": "shift",
}


class Region:
    """The operations of a straight program, with what it calls in the place of the calls."""

    def __init__(self, times: Amount, vocab: int | None, inner: Callable):
        self.times, self.vocab = times, vocab
        self.inner = inner  # reads the body of a loop, as a region of its own
        self.nodes: list[Node] = []

    def follow(self, program: Jaxpr, inputs: Sequence[Value], part: str) -> list[Value]:
        known = dict(zip(program.invars, inputs, strict=True))
        known |= {variable: per_device.value(variable) for variable in program.constvars}

        def value(variable: Any) -> Value:
            return Value(0, 4) if isinstance(variable, Literal) else known[variable]

        for equation in program.eqns:
            reads = [value(variable) for variable in equation.invars]
            writes = self.one(equation, reads, part)
            known.update(zip(equation.outvars, writes, strict=True))
        return [value(variable) for variable in program.outvars]

    def one(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name in _RENAMED or name == "reshard" and _enters(equation):
            return reads[:1]
        if name == "optimization_barrier":
            return reads
        if name == "scan":
            return self.loop(equation, reads, part)
        called = str(params.get("name") or "") if name in ("jit", "pjit") else ""
        if flash := self.flash(equation, called, part):
            return self.add(equation, reads, part, is_apart=True, record=flash, is_product=True)
        bodies = list(programs(params))
        if name in _CALLED and bodies:
            given = reads[-len(bodies[0].invars) or len(reads) :]
            return self.follow(bodies[0], given, "elementwise" if called == MICROBATCH else part)
        if name == "dot_general":
            return self.product(equation, reads, part)
        if name == "reshard":
            return self.reshard(equation, reads, part)
        if name in _TOGETHER:
            return self.together(equation, reads, part)
        if name in ("while", "cond"):
            body = max(bodies, key=lambda body: len(body.eqns))
            inside = [per_device.value(variable) for variable in body.invars]
            self.inner(body, inside, self.times, part)
            return self.add(equation, reads, part, is_apart=True)
        if name in _APART:
            return self.apart(equation, reads, part)
        return self.add(
            equation,
            reads,
            part,
            is_reduced=name in _REDUCED,
            is_cut=name in _CUT,
            operations=_operations(equation, reads),
            summed=_over(equation) if name in _REDUCED else (),
        )

    def add(self, equation: JaxprEqn, reads: list[Value], part: str, **about: Any) -> list[Value]:
        writes = [per_device.value(variable) for variable in equation.outvars]
        for variable, given in zip(equation.outvars, writes, strict=True):
            if per_device.is_automatic(variable) and (ways := _ways(equation, reads)) > 1:
                given.elements /= ways
                given.axes = max((value.axes for value in reads), key=len)
        if part == "elementwise" and self.has_words(equation.outvars):
            part = "head"
        is_free = any(map(per_device.is_automatic, equation.outvars))
        node = Node(equation.primitive.name, reads, writes, part, is_free=is_free, **about)
        self.nodes.append(node)
        return writes

    def has_words(self, variables: Sequence[Any]) -> bool:
        return any(per_device.is_of_words(per_device.shape(one), self.vocab) for one in variables)

    def flash(self, equation: JaxprEqn, called: str, part: str) -> Attention | None:
        """Attention by a kernel that the program only sketches."""
        pattern = Pattern.of(called)
        if pattern is None or not equation.outvars:
            return None
        (body,) = programs(equation.params)
        if not pattern.is_backward and any(
            e.primitive.name in ("dot_general", "jit", "pjit") for e in body.eqns
        ):
            return None
        shapes = [per_device.shape(variable) for variable in equation.invars]
        heads = [shape for shape in shapes if len(shape) == 4]
        rows, length, most, dim = max(heads, key=lambda shape: shape[2])
        return Attention(
            rows,
            length,
            min(shape[1] for shape in heads),
            most,
            min(shape[2] for shape in heads),
            dim,
            pattern,
            per_device.dtype(equation.invars[0]),
            self.times,
        )

    def product(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        (left_axes, _), (left_batch, _) = equation.params["dimension_numbers"]
        left, right = (per_device.shape_there(variable) for variable in equation.invars)
        k, batch = (math.prod(left[a] for a in axes) for axes in (left_axes, left_batch))
        m, n = math.prod(left) // max(1, k * batch), math.prod(right) // max(1, k * batch)
        written = per_device.value(equation.outvars[0])
        dtype = per_device.dtype(max(equation.invars, key=per_device.itemsize))
        here = {"elementwise": "products"}.get(part, part)
        if here == "products" and self.has_words([*equation.invars, *equation.outvars]):
            here = "head"
        moved = reads[0].bytes + reads[1].bytes + written.bytes
        record = Product(m, n, k, batch, dtype, moved, self.times, here)
        return self.add(
            equation,
            reads,
            part,
            is_apart=True,
            is_product=True,
            record=record,
            summed=per_device.axes_at(equation.invars[0], left_axes),
        )

    def reshard(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        before, after = (
            per_device.axes(equation.invars[0]) or reads[0].axes,
            per_device.axes(equation.outvars[0]),
        )
        lost = tuple(sorted(before - after))
        if not lost:
            return self.add(equation, reads, part, is_cut=True)
        moved = per_device.value(equation.outvars[0]).bytes
        record = Collective("gather", lost, moved, self.times, part)
        return self.add(equation, reads, part, is_apart=True, record=record)

    def together(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        names = equation.params.get("axes") or equation.params.get("axis_name") or ()
        axes = tuple(names) if isinstance(names, tuple | list) else (names,)
        whole = max(
            sum(v.bytes for v in reads), sum(per_device.value(v).bytes for v in equation.outvars)
        )
        kind = _TOGETHER[equation.primitive.name]
        record = Collective(kind, axes, whole, self.times, part)
        return self.add(equation, reads, part, is_apart=True, record=record)

    def apart(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        name = equation.primitive.name
        summed: tuple[str, ...] = ()
        if name.startswith(("scatter", "dynamic_update_slice")):
            # What is added is read, with the places that it is added to, which are written again.
            added = reads[1] if name == "dynamic_update_slice" else reads[2]
            own = 3 * added.bytes
            summed = (
                tuple(sorted(added.axes)) if per_device.is_automatic(equation.outvars[0]) else ()
            )
        else:
            own = sum(v.bytes for v in reads) + sum(
                per_device.value(v).bytes for v in equation.outvars
            )
        return self.add(equation, reads, part, is_apart=True, own=own, summed=summed)

    def loop(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        (body,) = programs(equation.params)
        length = equation.params["length"]
        constants, carried = constants_and_carried(body, equation)
        first = constants + carried  # of what each round has of its own
        inner = "elementwise" if part == "optimiser" else part
        if length == 1:  # no loop is left of it
            return self.follow(body, reads, inner)
        inside = [per_device.value(variable) for variable in body.invars]
        self.inner(
            body,
            inside,
            self.times * length,
            inner,
            sliced=range(first, len(body.invars)),
            stacked=range(carried, len(body.outvars)),
        )
        return self.add(equation, reads, inner, is_apart=True)


def _operations(equation: JaxprEqn, reads: list[Value]) -> Amount:
    """Operations on single numbers, each as long as a sum takes."""
    name = equation.primitive.name
    if name in _LAID_OUT:
        return 0.0
    given = max((math.prod(per_device.shape_there(v)) for v in equation.outvars), default=0)
    if name in _REDUCED:
        given = max((value.elements for value in reads), default=0)
    return given * _LONG.get(name, 1)


def _over(equation: JaxprEqn) -> tuple[str, ...]:
    return per_device.axes_at(equation.invars[0], equation.params["axes"])


def _enters(equation: JaxprEqn) -> bool:
    """Whether a reshard only hands an array over to the compiler's choice, or takes it back."""
    return per_device.is_automatic(equation.outvars[0]) and not per_device.is_automatic(
        equation.invars[0]
    )


def _ways(equation: JaxprEqn, reads: list[Value]) -> Amount:
    """Over how many devices the compiler splits what it chooses for: as its arguments are."""
    if equation.primitive.name.startswith("scatter"):
        return 1.0
    pairs = zip(equation.invars, reads, strict=True)
    return max(
        (math.prod(per_device.shape(v)) / x.elements for v, x in pairs if x.elements), default=1.0
    )
