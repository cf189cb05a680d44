"""Targets of a plan: slices of TPUs, hosts of GPUs, this machine."""

import difflib
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from windlass.config import KINDS, listing
from windlass.config.reading import offer
from windlass.devices import chips, mesh, selection, slices
from windlass.devices.absent import Absent
from windlass.devices.chips import Chip
from windlass.devices.slices import Slice, Slices
from windlass.errors import UserError

HERE = "here"
# What a name without its memory stands for: the smaller one, so that what fits there fits.
SHORT = {"a100": "a100-40gb", "v100": "v100-16gb", "h100-80gb": "h100", "h200-141gb": "h200"}
UNPUBLISHED = {"8t", "8i"}  # generations without slices that one could name
MOST = 100_000  # devices of a plan: more are a slip of the pen, and take long to lay out


class Target(NamedTuple):
    """Devices of one kind that a run could have."""

    name: str  # v5e-8, 2xv6e-16, h100, 8xh200
    chip: Chip  # one device, as JAX counts them
    devices: int
    chips: int  # that are rented: on v2, v3 and 7x half as many as devices
    hosts: int
    slices: Slices | None = None  # of TPUs

    @property
    def absent(self) -> list[Absent]:
        """Its devices, in the place of JAX's and in their order."""
        of = self.chip
        device = partial(Absent, of.kind, of.device_kinds[0])
        if self.slices is not None:
            each = _places(self.slices.each)
            numbers = range(self.slices.count)
            places = [(number, 0, *place) for number in numbers for place in each]
            return [device(*place, id=i) for i, place in enumerate(places)]
        if of.kind == "gpu":
            return [device(i // of.joined, i // of.per_host, id=i) for i in range(self.devices)]
        return [device(core_on_chip=i, id=i) for i in range(self.devices)]

    @property
    def notes(self) -> list[str]:
        """Notes for a plan on this target."""
        if self.chip.slug not in UNPUBLISHED:
            return []
        return [f"no slices of {self.chip.name} are published: this is one chip alone"]


def find(name: str) -> Target:
    """Parse the name of a target: `v5e-8`, `2xv6e-16`, `h100`, `8xh200`, `cpu`, or `here`."""
    target = here() if name.strip().lower() == HERE else _named(name)
    if target.devices > MOST:
        raise UserError(f'"{name}" is {target.devices:,} devices; a plan has {MOST:,} at most')
    return target


def _named(name: str) -> Target:
    # As SkyPilot writes it, the number is behind: h100:8.
    plain = re.sub(r"^(.*):(\d+)$", r"\2x\1", name.strip().lower())
    # Of 7x and 7x-8 the first part is no number of anything.
    number, rest = re.findall(r"^(?:(\d+)\s*[x×*]\s*(?=[^\s-]))?(.*)$", plain)[0]
    count = int(number or 1)
    if rest == "cpu":
        return _cpu(_counted(name, count, "CPU devices"))
    chip = _by_slug(rest)
    if chip is not None and chip.kind == "gpu":
        return _gpus(chip, _counted(name, count, "GPUs"))
    generation = re.fullmatch(r"(?:tpu[- ]?)?(?:v(?=[78]))?(v\d+[a-z]*|7x|8[a-z]?)(?:-\d+)?", rest)
    if generation is None:
        raise UserError(f'no chip is called "{name}"; {_near(rest)}')
    if generation[1] not in UNPUBLISHED:
        group = slices.find(f"{number}x{rest}" if number else rest)
        return _sliced(group)
    alone = _by_slug(generation[1])
    assert alone is not None
    if rest.endswith(generation[1]) and count == 1:
        return Target(alone.slug, alone, 2 if alone.slug == "8i" else 1, 1, 1)
    raise UserError(
        f'there is no TPU slice "{name}": none of {alone.name} is published. {alone.slug} is one '
        f"chip alone, and slices are of {listing(_generations(), 'and')}"
    )


def chip(name: str) -> Chip:
    """The chip of its own name, or of a target's: `v5e`, `v5e-8`, `a100`."""
    plain = name.strip().lower()
    if (exact := _by_slug(plain)) is not None:
        return exact
    try:
        return find(name).chip
    except UserError:
        if re.search(r"^\d+x|-\d+$", plain):  # a slice or several GPUs, whose error says more
            raise
    names = [one.slug for one in chips.every()]
    raise UserError(f'no chip is called "{name}"; {offer(plain, names)}')


def several(names: str | Sequence[str]) -> list[Target]:
    """Parse names separated by commas, each target once, or raise one error of every problem."""
    parts = names.split(",") if isinstance(names, str) else names
    entries = [part for part in parts if part.strip()]
    if not entries:
        raise UserError("on what? A TPU slice as v5e-8, GPUs as h100 or 8xh200, cpu, or here")
    by_name: dict[str, Target] = {}
    problems: list[str] = []
    for part in entries:
        try:
            target = find(part)
        except UserError as error:
            problems.append(str(error))
        else:
            by_name.setdefault(target.name, target)
    if problems:
        raise UserError("\n".join(problems))
    return list(by_name.values())


def here() -> Target:
    """The best devices of this machine, and of those that work together with it."""
    present = selection.present()
    return of(jax.devices(next(kind for kind in KINDS if present.get(kind))))


def of(devices: Sequence[Any]) -> Target:
    """Target of some JAX devices."""
    count, first = len(devices), devices[0]
    if first.platform == "cpu":
        return _cpu(count)
    chip, islands = chips.find(first.device_kind) or _unknown(first), mesh.slices(devices)
    for one in slices.every() if first.platform == "tpu" else ():
        if chips.find(one.device_kind) == chip and one.devices * islands == count:
            return _sliced(Slices(one, islands))
    return Target(_times(count, chip.slug), chip, count, count, jax.process_count())


def _sliced(group: Slices) -> Target:
    chip = chips.find(group.each.device_kind)
    assert chip is not None
    return Target(group.name, chip, group.devices, group.chips, group.hosts, group)


def _gpus(chip: Chip, count: int) -> Target:
    each = chip.per_host
    if count > each and count % each:
        below = count // each * each
        raise UserError(
            f'"{count}x{chip.slug}" is no whole number of hosts, which have {each} GPUs each; '
            f"{below}x{chip.slug} or {below + each}x{chip.slug} would do"
        )
    return Target(_times(count, chip.slug), chip, count, count, -(-count // each))


def _cpu(count: int) -> Target:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chip = Chip("CPU", "cpu", {}, memory // count, ("cpu",))
    return Target(_times(count, "cpu"), chip, count, count, 1)


def _unknown(device: Any) -> Chip:
    """Chip that is not in the catalogue, as its device describes itself."""
    kind = device.platform
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = int(limit / chips.share()) if kind == "gpu" else limit
    return Chip(device.device_kind, kind, {}, memory, (device.device_kind,))


def _places(one: Slice) -> list[tuple[tuple[int, int, int], int]]:
    """Coordinates of each device of a slice: its chip, of which x counts fastest, and its core."""
    x, y, z = (*one.sides, 1)[:3]
    cores = range(one.devices // one.chips)
    chips_there = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [(place, core) for place in chips_there for core in cores]


def _times(count: int, name: str) -> str:
    return name if count == 1 else f"{count}x{name}"


def _counted(name: str, count: int, what: str) -> int:
    if count < 1:
        raise UserError(f'"{name}" has no {what}; 1 or more would do')
    return count


def _by_slug(name: str) -> Chip | None:
    """The chip of a name, however its words are put together: `rtx4090`, `A100-80GB`, `4090`."""
    words = re.sub(r"[\s_-]+|nvidia|geforce|tesla|tpu|sxm\d?", "", name)
    known = {chip.slug: chip for chip in chips.every()}
    known |= {short: known[slug] for short, slug in SHORT.items()}
    spelled = {slug.replace("-", ""): chip for slug, chip in known.items()}
    return next(
        (spelled[one] for one in (words, f"{words}gb", f"rtx{words}") if one in spelled), None
    )


def _generations() -> list[str]:
    return list(dict.fromkeys(one.generation for one in slices.every()))


def _near(name: str) -> str:
    """Suggestions for an unknown name, and the names that there are."""
    gpus = [chip.slug for chip in chips.every() if chip.kind == "gpu"]
    names = [*gpus, *SHORT, *(one.name for one in slices.every()), "cpu", HERE]
    meant = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {listing(meant)}? " if meant else ""
    return (
        f"{hint}GPUs are {listing(gpus, 'and')}, as in h100 or 8xh100; TPU slices are of "
        f"{listing(_generations(), 'and')}, as in v6e-8 or 2xv6e-16; and there are cpu and here"
    )
