"""GPUs that are rented by the host, on whichever cloud has them."""

from windlass.devices.chips import Chip
from windlass.devices.slices import Slice, Slices
from windlass.errors import UserError
from windlass.launch.description import Launch
from windlass.planning import prices, targets
from windlass.planning.prices import Price

KIND = "gpu"
# The names that SkyPilot's catalogues have for chips of ours.
ACCELERATORS = {
    "t4": "T4",
    "l4": "L4",
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "rtx-pro-6000": "RTXPRO6000",
}
# JAX's processes find each other as those of any cluster do.
JOINED = """\
export MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS") MASTER_PORT=29500
export WORLD_SIZE=$SKYPILOT_NUM_NODES RANK=$SKYPILOT_NODE_RANK"""


class GpuHosts(Slices):
    """GPUs of one kind: hosts of as many, in the place of slices of TPUs."""

    @property
    def name(self) -> str:
        count, kind = self.devices, self.each.generation
        return kind if count == 1 else f"{count}x{kind}"


def find(name: str) -> GpuHosts | None:
    """The GPUs of a name, `h100`, `8xh100` or `h100:8`; None where it names no GPUs."""
    try:
        target = targets.find(name)
    except UserError:
        # Of GPUs the message says what would do; a slice has messages of its own.
        if any(slug.partition("-")[0] in name.lower() for slug in ACCELERATORS):
            raise
        return None
    if target.chip.kind != KIND:
        return None
    return GpuHosts(_host(target.chip, target.devices // target.hosts), target.hosts)


def _host(chip: Chip, count: int) -> Slice:
    accelerator = ACCELERATORS.get(chip.slug)
    if accelerator is None:
        raise UserError(f"SkyPilot rents no {chip.slug}; it has {', '.join(ACCELERATORS)}")
    return Slice(
        name=f"{count}x{chip.slug}",
        generation=chip.slug,
        topology=str(count),
        hosts=1,
        device_kind=chip.device_kinds[0],
        devices=count,
        accelerator_type=f"{accelerator}:{count}",
        runtime=None,
        machine_type=None,
        label=None,
        zones=(),
    )


def refuse(launch: Launch) -> None:
    """Refuse GPUs where TPUs alone are rented."""
    if isinstance(launch.slices, GpuHosts):
        raise UserError(
            f"--on is {launch.slices.name}, and GPUs are rented by --to skypilot alone, on any "
            "cloud"
        )


def price(launch: Launch) -> str | None:
    """Price of an hour, by the catalogue; None where it has none."""
    known = prices.load().find(launch.slices.each.generation, hosts=launch.slices.hosts)
    on_demand, spot = prices.of_one_provider(known)
    parts = [(on_demand, "on_demand", "on demand"), (spot, "spot", "spot")]
    shown = [_hourly(one, kind, word, launch.slices.chips) for one, kind, word in parts if one]
    return f"{', '.join(shown)}; `windlass prices` has others" if shown else None


def _hourly(one: Price, kind: str, word: str, chips: int) -> str:
    return f"${getattr(one, kind) * chips:,.2f} an hour {word} at {one.place} ({one.date})"
