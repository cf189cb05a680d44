"""Cluster detection: rank and world size, from the command line, torchrun, Slurm or a cloud."""

from collections.abc import Mapping
from typing import NamedTuple

from windlass.config import listing, section
from windlass.errors import UserError

SLURM = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")  # by which JAX knows a step
HIGHEST_PORT = 65_535


class Hosts(NamedTuple):
    """The coordinator, rank and world size of a run, and where they come from."""

    coordinator: str | None  # HOST:PORT of process 0; None: JAX finds it
    processes: int
    process: int
    source: str  # "--coordinator", "torchrun", "Slurm", "GKE" or "TPU metadata"
    # GPUs of this host, by number, where it has a process for each; None: all devices
    local_devices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes}"


@section
class ClusterFlags:
    """Coordinator, rank and world size as the command line gives them."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def find(flags: ClusterFlags | None, environ: Mapping[str, str]) -> Hosts | None:
    """Rank and world size of this process; None where it is the only one.

    The command line comes first, then torchrun, then what JAX itself detects. Only on a
    Cloud TPU is the network used.
    """
    hosts = (
        _of_flags(flags or ClusterFlags())
        or _of_torchrun(environ)
        or _of_slurm(environ)
        or _of_tpu("GkeTpuCluster", "GKE")
        or _of_tpu("GceTpuCluster", "TPU metadata")
    )
    return hosts if hosts is not None and hosts.processes > 1 else None


def _of_flags(flags: ClusterFlags) -> Hosts | None:
    if flags == ClusterFlags():
        return None
    if missing := [f"--{name}" for name, value in vars(flags).items() if value is None]:
        are = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{listing(missing, 'and')} {are} missing; --coordinator HOST:PORT, --processes N and "
            "--process I go together, on every host"
        )
    assert flags.coordinator is not None
    assert flags.processes is not None and flags.process is not None
    host, _, port = flags.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT:
        raise UserError(
            f"--coordinator is {flags.coordinator}; it must be HOST:PORT, where process 0 listens "
            "for the others, such as 10.0.0.2:8476"
        )
    _check_place("--process", flags.process, "--processes", flags.processes)
    return Hosts(flags.coordinator, flags.processes, flags.process, "--coordinator")


def _of_torchrun(environ: Mapping[str, str]) -> Hosts | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    processes, process = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    _check_place("RANK", process, "WORLD_SIZE", processes)
    if processes == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise UserError(
                f"WORLD_SIZE is {processes}, and {name} is not set; torchrun sets RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT together"
            )
    port = _number(environ, "MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens on that port, for as long as the processes live.
        port += 1 if port < HIGHEST_PORT else -1
    local = None
    if environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        local = (_number(environ, "LOCAL_RANK"),)
    coordinator = f"{environ['MASTER_ADDR']}:{port}"
    return Hosts(coordinator, processes, process, "torchrun", local)


def _of_slurm(environ: Mapping[str, str]) -> Hosts | None:
    if any(f"SLURM_{name}" not in environ for name in SLURM):
        return None
    processes, process = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_PROCID")
    local = None
    if environ.get("SLURM_STEP_NUM_NODES") != environ["SLURM_NTASKS"]:
        local = (_number(environ, "SLURM_LOCALID"),)
    return Hosts(None, processes, process, "Slurm", local)


def _of_tpu(cluster: str, source: str) -> Hosts | None:
    # The way JAX itself looks, which it shows nowhere else; `jax.distributed.initialize` would
    # start its service for a single process, too.
    from jax._src import clusters

    detector = getattr(clusters, cluster)
    try:
        if not detector.is_env_present():
            return None
        return Hosts(None, detector.get_process_count(), detector.get_process_id(), source)
    except OSError:  # no metadata server answers: this is no machine of a slice
        return None


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdecimal():
        raise UserError(f'{name} is "{value}"; whoever starts the processes sets it to a number')
    return int(value)


def _check_place(name: str, process: int, of: str, processes: int) -> None:
    if processes < 1:
        raise UserError(f"{of} is {processes}; it must be 1 or more")
    if not 0 <= process < processes:
        would = "0" if processes == 1 else f"0 to {processes - 1}"
        raise UserError(f"{name} is {process}, and {of} is {processes}: {would} would do")
