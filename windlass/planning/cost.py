"""Cost of a run: hours and money, on demand and on spot machines, which are preempted."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from windlass.analysis.fusion import Amount
from windlass.config import Every
from windlass.errors import UserError
from windlass.planning import price_file, prices
from windlass.planning.extent import Extent
from windlass.planning.memory import Memory
from windlass.planning.prices import Price, Prices
from windlass.planning.targets import Target
from windlass.planning.time import Time

# The first save of a run makes room on its host: 4.8 s for 6.4 GB, measured on an H200. Later ones
# block a run while the state is copied there, and are written asynchronously.
FIRST_SAVE = 4.8 / 6.4e9  # seconds a byte
SLOWEST_HOST = 8e9  # bytes/s, where the catalogue does not know how fast a device reaches its host
# The parts of memory that a save holds.
SAVED = ("weights", "adapters", "optimiser", "average", "carry")
LEAST = 0.1  # of the time of a step, which no step is below, however wrong its time may be
HOUR = 3600.0


class Assumed(NamedTuple):
    """Assumptions that nothing here can estimate."""

    boot: Amount = 180.0  # seconds until a machine has installed what it needs and begins
    compile: Amount = 60.0  # seconds, of the step and whatever else a run compiles
    preemptions: Amount | None = None  # per hour, of the whole target; None: not known


class Interval(NamedTuple):
    """Expected value, and its bounds if the step time is as wrong as it may be."""

    low: Amount
    expected: Amount
    high: Amount


class Bill(NamedTuple):
    """Time and cost of a run, or of some of it; None where not known."""

    hours: Interval
    on_demand: Interval | None  # USD
    spot_hours: Interval | None  # with its restarts; None: it would never end
    spot: Interval | None  # USD
    restarts: Amount | None  # that are expected on spot
    lost_hours: Amount | None  # of these


class Cost(NamedTuple):
    """Cost of a run on a target, and all that it follows from."""

    run: Bill | None  # None: its length is not known
    epoch: Bill | None
    million_tokens: Bill
    on_demand: Price | None  # the cheapest anywhere, or in the requested region
    spot: Price | None  # the cheapest of the same provider
    inputs: dict[str, Any]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON form; units are in the names."""
        bills = {"run": self.run, "epoch": self.epoch, "million_tokens": self.million_tokens}
        return {
            **{name: bill and _plain(bill) for name, bill in bills.items()},
            "on_demand": self.on_demand and self.on_demand._asdict(),
            "spot": self.spot and self.spot._asdict(),
            "inputs": self.inputs,
        }


def cost(
    time: Time,
    extent: Extent,
    target: Target,
    known: Prices,
    *,
    every: Every,
    saved: Amount,
    where: str | None = None,
    assumed: Assumed | None = None,
) -> Cost:
    """Cost of a run of this extent, at the cheapest place or in the region `where`.

    A checkpoint of `saved` bytes per device is saved `every` so often. The hours are of training
    and saving: evaluation comes on top.
    """
    assumed = assumed or Assumed()
    _check(assumed)
    if where is not None:
        prices.check_place(known, where)
    offers = known.find(target.chip.slug, hosts=target.hosts if target.slices else 1)
    on_demand, spot = prices.of_one_provider(offers, where)
    work = _Work(time, extent, target, every, saved, assumed)
    dollars = (
        on_demand and on_demand.on_demand and on_demand.on_demand * target.chips,
        spot and spot.spot and spot.spot * target.chips,
    )
    steps, epoch = extent.steps, extent.epoch_steps
    bills = [
        steps and work.bill(steps, *dollars, is_run=True),
        epoch and work.bill(epoch, *dollars),
        work.bill(1e6 / extent.tokens, *dollars),
    ]
    run, of_epoch, million = (bill or None for bill in bills)
    assert million is not None
    inputs = work.inputs | {"region": where}
    notes = _notes(target, (on_demand, spot), offers, where, assumed, million)
    return Cost(run, of_epoch, million, on_demand, spot, inputs, notes)


def saved_bytes(memory: Memory) -> Amount:
    """Bytes per device of a checkpoint."""
    return sum(memory.parts.get(name, 0.0) for name in SAVED)


class _Work(NamedTuple):
    """Duration of a run, by all that adds to it."""

    time: Time
    extent: Extent
    target: Target
    every: Every
    saved: Amount
    assumed: Assumed

    @property
    def save(self) -> Amount:
        return self.saved / (self.target.chip.host or SLOWEST_HOST)

    @property
    def start(self) -> Amount:
        return self.assumed.boot + self.assumed.compile

    def between(self, step: Amount) -> Amount | None:
        """Seconds from one save to the next; None: that depends on how long an epoch is."""
        return self.every.seconds(step, self.extent.epoch_steps)

    def bill(
        self, steps: Amount, on_demand: Amount | None, spot: Amount | None, is_run: bool = False
    ) -> Bill:
        hours = self._over(lambda step: self._busy(steps, step, is_run))
        spot_hours = self._spot_hours(steps, is_run)
        rate = self.assumed.preemptions
        restarts = None if rate is None or spot_hours is None else rate * spot_hours.expected
        return Bill(
            hours,
            _times(hours, on_demand),
            spot_hours,
            _times(spot_hours, spot),
            restarts,
            None if restarts is None or spot_hours is None else spot_hours[1] - hours.expected,
        )

    def _over(self, hours: Callable[[Amount], Amount]) -> Interval:
        step, error = self.time.seconds, self.time.error
        return Interval(*(hours(step * share) for share in (max(LEAST, 1 - error), 1.0, 1 + error)))

    def _busy(self, steps: Amount, step: Amount, is_run: bool) -> Amount:
        """Hours without a restart."""
        training = steps * step
        between = self.between(step)
        saves = training / between if between else 0.0
        seconds = training + saves * self.save
        if is_run:
            seconds += self.start + self.save + self.saved * FIRST_SAVE
        return seconds / HOUR

    def _spot_hours(self, steps: Amount, is_run: bool) -> Interval | None:
        """Hours with restarts, each of which costs half of what lies between two saves.

        There are as many as the hours they themselves add to are long, so that T is
        W + rate · T · lost.
        """
        rate = self.assumed.preemptions or 0.0

        def lost(step: Amount) -> Amount:
            run = (self.extent.steps or steps) * step
            between = self.between(step) or run
            interval = between if self.extent.steps is None else min(between, run)
            return (interval / 2 + self.start) / HOUR

        if rate * lost(self.time.seconds * (1 + self.time.error)) >= 1:
            return None
        return self._over(lambda step: self._busy(steps, step, is_run) / (1 - rate * lost(step)))

    @property
    def inputs(self) -> dict[str, Any]:
        """All that a bill follows from, by name."""
        return {
            "step_seconds": self.time.seconds,
            "step_error_share": self.time.error,
            "steps": self.extent.steps,
            "steps_per_epoch": self.extent.epoch_steps,
            "tokens_per_step": self.extent.tokens,
            "chips": self.target.chips,
            "saved_bytes_per_device": self.saved,
            "seconds_between_saves": self.between(self.time.seconds),
            "save_seconds": self.save,
            "first_save_seconds": self.save + self.saved * FIRST_SAVE,
            "boot_seconds": self.assumed.boot,
            "compile_seconds": self.assumed.compile,
            "preemptions_per_hour": self.assumed.preemptions,
        }


def _check(assumed: Assumed) -> None:
    for name, value in assumed._asdict().items():
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{name} is {value:g}; it must be 0 or more")


def _notes(
    target: Target,
    chosen: tuple[Price | None, Price | None],
    offers: Sequence[Price],
    where: str | None,
    assumed: Assumed,
    million: Bill,
) -> list[str]:
    slug, notes, (on_demand, spot) = target.chip.slug, [], chosen
    there = f" at {where}" if where else ""
    missing = [kind for kind, price in (("on demand", on_demand), ("spot", spot)) if price is None]
    other = None if where or spot else prices.cheapest(offers, "spot")
    if on_demand is not None and other is not None:
        notes.append(
            f"no spot price of {slug} is known at {on_demand.provider}, the cheapest on demand; "
            f"--region {other.provider} plans with ${other.spot:.2f} spot there"
        )
    elif missing and slug not in price_file.names():
        notes.append(f"no price of a {target.chip.name} is in the catalogue")
    elif missing:
        kinds = " or ".join(missing)
        notes.append(
            f"no price of {slug} {kinds} is known{there}; `windlass prices --update FILE` takes one"
        )
    if spot is not None and assumed.preemptions is None:
        notes.append(
            "spot costs are without restarts: --preemptions 0.1 adds those of one preemption in "
            "ten hours"
        )
    if million.spot_hours is None:
        notes.append(
            f"at {assumed.preemptions:g} preemptions an hour a run on spot machines would lose "
            "more than it gains: checkpoint.every must be shorter"
        )
    warning = prices.warning([price for price in (on_demand, spot) if price is not None])
    return [*notes, *([warning] if warning else [])]


def _times(span: Interval | None, factor: Amount | None) -> Interval | None:
    if span is None or factor is None:
        return None
    return Interval(*(value * factor for value in span))


def _plain(bill: Bill) -> dict[str, Any]:
    spans = {
        "hours": bill.hours,
        "on_demand_usd": bill.on_demand,
        "spot_hours": bill.spot_hours,
        "spot_usd": bill.spot,
    }
    plain = {name: span and span._asdict() for name, span in spans.items()}
    return {**plain, "spot_restarts": bill.restarts, "spot_lost_hours": bill.lost_hours}
