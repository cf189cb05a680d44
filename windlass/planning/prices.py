"""What chips cost to rent: data with a date, which a user can replace."""

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
    """What a chip costs at a provider, in USD an hour; None is not known."""

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
    chips: list[str]  # that were asked for

    def of(self, names: Sequence[str]) -> "Prices":
        """The prices of these chips alone."""
        some = [price for price in self.prices if price.name in names]
        return self._replace(prices=some, chips=list(dict.fromkeys(names)))

    def find(self, name: str, *, hosts: int = 1) -> list[Price]:
        """What a chip costs wherever that is known, in slices of so many hosts."""
        found = [price for price in self.prices if price.name == name]
        pods = [price for price in found if price.pods]
        return pods if hosts > 1 and pods else [price for price in found if not price.pods]

    @property
    def unknown(self) -> list[str]:
        """The chips that have no price."""
        known = {price.name for price in self.prices}
        return [name for name in self.chips if name not in known]


def warning(found: Sequence[Price]) -> str | None:
    """What is to be said where one of these prices is old."""
    oldest = min((price.date for price in found), default=None)
    if oldest is None or days(oldest) <= OLD:
        return None
    return (
        f"prices here are of {oldest}, {days(oldest)} days ago, and spot prices change daily: "
        "`windlass prices --update FILE` takes newer ones"
    )


def cheapest(found: Sequence[Price], kind: str, where: str | None = None) -> Price | None:
    """The lowest price `on_demand` or `spot`, anywhere or at a provider or in a region."""
    there = [price for price in found if where in (None, price.provider, price.region)]
    known = [price for price in there if getattr(price, kind) is not None]
    return min(known, key=lambda price: getattr(price, kind), default=None)


def check_place(prices: Prices, where: str) -> None:
    """Refuse a provider or a region of which no price is known at all."""
    names = {name for price in prices.prices for name in (price.provider, price.region) if name}
    if where not in names:
        raise UserError(f"no price is of {where}; {offer(where, sorted(names))}")


def load() -> Prices:
    """The user's prices where there are any, and otherwise those that came with windlass."""
    stored = _stored()
    if not stored.is_file():
        return read(SHIPPED)
    try:
        return read(stored)
    except UserError as error:
        raise UserError(
            f"{error}\n`windlass prices --reset` goes back to those of windlass"
        ) from None


def update(file: str | Path) -> Prices:
    """Take the prices of a file from now on, if nothing is wrong with it."""
    place = Path(file).expanduser()
    found, stored = read(place), _stored()
    with files.writable(stored):
        files.write(stored, place.read_bytes())
    return found._replace(file=stored)


def reset() -> Prices:
    """Go back to the prices that came with windlass."""
    _stored().unlink(missing_ok=True)
    return read(SHIPPED)


def read(file: Path) -> Prices:
    """The prices in a file, or one error that lists every problem."""
    listed = price_file.read(file)
    prices = [
        Price(
            *(row.chip.text, row.provider, row.region),
            *(row.on_demand and row.on_demand.number, row.spot and row.spot.number),
            *((row.date or listed.date).text, row.pods, row.note),
        )
        for row in listed.prices
    ]
    return Prices(listed.date.text, listed.sources, prices, file, price_file.names())


def _stored() -> Path:
    return folder.folder() / "prices.yaml"
