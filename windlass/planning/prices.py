"""Rental prices of chips: data with a date, which a user can replace."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from windlass import files
from windlass.config import folder
from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.planning import price_file
from windlass.planning.price_file import days

SHIPPED = Path(__file__).with_name("prices.yaml")
OLD = 90  # days, after which spot prices say little


class Price(NamedTuple):
    """Rental price of a chip at a provider, in USD per hour; None where not known."""

    name: str  # of the chip: v5e, h100
    provider: str
    region: str | None
    on_demand: float | None
    spot: float | None
    date: str
    pods: bool = False  # of TPU slices beyond one host, where these cost otherwise
    note: str | None = None

    @property
    def place(self) -> str:
        return f"{self.provider} {self.region}" if self.region else self.provider


class Prices(NamedTuple):
    """All prices that are known, and where they are from."""

    date: str
    sources: list[str]
    prices: list[Price]
    file: Path
    chips: list[str]  # that were requested

    def of(self, names: Sequence[str]) -> "Prices":
        """The prices of these chips alone."""
        some = [price for price in self.prices if price.name in names]
        return self._replace(prices=some, chips=list(dict.fromkeys(names)))

    def find(self, name: str, *, hosts: int = 1) -> list[Price]:
        """Prices of a chip wherever they are known, in slices of this many hosts."""
        matches = [price for price in self.prices if price.name == name]
        pods = [price for price in matches if price.pods]
        return pods if hosts > 1 and pods else [price for price in matches if not price.pods]

    @property
    def unknown(self) -> list[str]:
        """The chips that have no price."""
        known = {price.name for price in self.prices}
        return [name for name in self.chips if name not in known]


def warning(prices: Sequence[Price]) -> str | None:
    """Warning where one of these prices is old."""
    oldest = min((price.date for price in prices), default=None)
    if oldest is None or days(oldest) <= OLD:
        return None
    return (
        f"prices are from {oldest}, {days(oldest)} days ago, and spot prices change daily: "
        "`windlass prices --update FILE` takes newer ones"
    )


def cheapest(prices: Sequence[Price], kind: str, where: str | None = None) -> Price | None:
    """The lowest price `on_demand` or `spot`, anywhere or at a provider or in a region."""
    there = [price for price in prices if where in (None, price.provider, price.region)]
    known = [price for price in there if getattr(price, kind) is not None]
    return min(known, key=lambda price: getattr(price, kind), default=None)


def of_one_provider(
    prices: Sequence[Price], where: str | None = None
) -> tuple[Price | None, Price | None]:
    """Cheapest price on demand, and the cheapest spot price of the same provider.

    Spot machines of one provider are often dearer than those on demand of another.
    """
    on_demand = cheapest(prices, "on_demand", where)
    same = [one for one in prices if on_demand is None or one.provider == on_demand.provider]
    return on_demand, cheapest(same, "spot", where)


def check_place(prices: Prices, where: str) -> None:
    """Refuse a provider or a region of which no price is known at all."""
    names = {name for price in prices.prices for name in (price.provider, price.region) if name}
    if where not in names:
        raise UserError(f"no price is known at {where}; {offer(where, sorted(names))}")


def load() -> Prices:
    """The user's prices where there are any, and otherwise those that came with windlass."""
    stored = _stored()
    if not stored.is_file():
        return read(SHIPPED)
    try:
        return read(stored)
    except UserError as error:
        raise UserError(f"{error}\n`windlass prices --reset` restores those of windlass") from None


def update(file: str | Path) -> Prices:
    """Replace the prices by those of a file, if nothing is wrong with it."""
    place = Path(file).expanduser()
    new, stored = read(place), _stored()
    with files.writable(stored):
        files.write(stored, place.read_bytes())
    return new._replace(file=stored)


def reset() -> Prices:
    """Restore the prices that came with windlass."""
    _stored().unlink(missing_ok=True)
    return read(SHIPPED)


def read(file: Path) -> Prices:
    """The prices in a file, or one error that lists every problem."""
    contents = price_file.read(file)
    prices = [
        Price(
            *(row.chip.text, row.provider, row.region),
            *(row.on_demand and row.on_demand.number, row.spot and row.spot.number),
            *((row.date or contents.date).text, row.pods, row.note),
        )
        for row in contents.prices
    ]
    return Prices(contents.date.text, contents.sources, prices, file, price_file.names())


def _stored() -> Path:
    return folder.folder() / "prices.yaml"
