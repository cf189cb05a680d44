"""The place of a process among those of its run, from whoever started it."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from windlass.errors import UserError
from windlass.processes.clusters import ClusterFlags, Hosts, find

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"}
SLURM |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2"}


def flags(coordinator="host-a:8476", processes=2, process=1) -> ClusterFlags:
    return ClusterFlags(coordinator=coordinator, processes=processes, process=process)


def test_flags_win_over_what_the_environment_says():
    assert find(flags(), TORCHRUN | SLURM) == Hosts("host-a:8476", 2, 1, "--coordinator")


def test_torchrun_tells_rank_and_address():
    assert find(None, TORCHRUN | SLURM) == Hosts("host-a:29500", 2, 1, "torchrun")


def test_a_port_that_torchrun_itself_holds_is_left_to_it():
    holds = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert find(None, holds) == Hosts("host-a:29501", 2, 1, "torchrun")
    highest = find(None, holds | {"MASTER_PORT": "65535"})
    assert highest is not None and highest.coordinator == "host-a:65534"


def test_processes_on_one_host_each_take_a_gpu_of_their_own():
    several = {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    assert find(None, TORCHRUN | several) == Hosts("host-a:29500", 2, 1, "torchrun", (3,))
    assert find(None, SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "1"}) == Hosts(
        None, 2, 1, "Slurm", (1,)
    )


def test_a_step_of_slurm_with_several_tasks_is_joined_as_jax_knows_it():
    assert find(None, SLURM) == Hosts(None, 2, 1, "Slurm")


@pytest.mark.parametrize(
    "asked, environ",
    [
        (None, {}),
        (flags(processes=1, process=0), {}),
        (None, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}),
        (None, {"WORLD_SIZE": "2"}),
        (None, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
        # The shell of an allocation, outside of any step.
        (None, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}),
    ],
)
def test_a_single_process_joins_nobody(asked, environ):
    assert find(asked, environ) is None


@pytest.mark.parametrize(
    "asked, environ, message",
    [
        (
            ClusterFlags(coordinator="host-a:8476", processes=2),
            {},
            "--process is missing; --coordinator HOST:PORT, --processes N and --process I go "
            "together, on every host",
        ),
        (
            ClusterFlags(process=1),
            {},
            "--coordinator and --processes are missing; --coordinator HOST:PORT, --processes N and "
            "--process I go together, on every host",
        ),
        (flags(process=2), {}, "--process is 2, and --processes is 2: 0 to 1 would do"),
        (flags(processes=1), {}, "--process is 1, and --processes is 1: 0 would do"),
        (flags(processes=0), {}, "--processes is 0; it must be 1 or more"),
        (
            flags("host-a"),
            {},
            "--coordinator is host-a; it must be HOST:PORT, where process 0 listens for the "
            "others, such as 10.0.0.2:8476",
        ),
        (
            flags("host-a:65536"),
            {},
            "--coordinator is host-a:65536; it must be HOST:PORT, where process 0 listens for the "
            "others, such as 10.0.0.2:8476",
        ),
        (
            None,
            TORCHRUN | {"RANK": "one"},
            'RANK is "one"; whoever starts the processes sets it to a number',
        ),
        (None, TORCHRUN | {"RANK": "2"}, "RANK is 2, and WORLD_SIZE is 2: 0 to 1 would do"),
        (
            None,
            TORCHRUN | {"MASTER_ADDR": ""},
            "WORLD_SIZE is 2, and MASTER_ADDR is not set; torchrun sets RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(asked, environ, message):
    with pytest.raises(UserError) as refused:
        find(asked, environ)
    assert str(refused.value) == message


@pytest.fixture
def on_a_tpu(monkeypatch):
    """A machine that JAX takes for one of a Cloud TPU."""
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    return monkeypatch


def test_gke_names_the_workers_of_a_slice(on_a_tpu):
    for name, value in {"HOSTNAMES": "a,b", "ID": "1"}.items():
        on_a_tpu.setenv(f"TPU_WORKER_{name}", value)
    for name, value in {"NUM_SLICES": "2", "SLICE_ID": "1"}.items():
        on_a_tpu.setenv(f"MEGASCALE_{name}", value)
    assert find(None, {}) == Hosts(None, 4, 3, "GKE")
    on_a_tpu.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    on_a_tpu.setenv("TPU_WORKER_ID", "0")
    on_a_tpu.setenv("MEGASCALE_NUM_SLICES", "1")
    on_a_tpu.setenv("MEGASCALE_SLICE_ID", "0")
    assert find(None, {}) is None


@pytest.mark.parametrize(
    "endpoints, found",
    [("10.0.0.1,10.0.0.2", Hosts(None, 2, 1, "TPU metadata")), ("10.0.0.1", None)],
)
def test_a_tpu_vm_asks_the_metadata_server_for_the_workers(on_a_tpu, endpoints, found):
    answers = {"agent-worker-number": "1", "worker-network-endpoints": endpoints, "tpu-env": ""}

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path.rpartition("/")[2]].encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        on_a_tpu.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        on_a_tpu.delenv("TPU_SKIP_MDS_QUERY", raising=False)
        assert find(None, {}) == found
        server.shutdown()


def test_a_tpu_without_a_metadata_server_is_one_process(on_a_tpu):
    on_a_tpu.setenv("GCE_METADATA_IP", "127.0.0.1:1")
    assert find(None, {}) is None
