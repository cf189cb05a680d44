"""The program on a machine that seems to have an accelerator which does not work."""

import os
import subprocess
import sys
from collections.abc import Mapping

from tests import trained

PROGRAM = """\
import logging, os, sys
from glob import glob

import jax
from jax._src import hardware_utils, xla_bridge

how, holder = sys.argv[1], sys.argv[2]
CUDA = "operation cuInit(0) failed: CUDA_ERROR_SYSTEM_NOT_READY"

def busy():
    raise RuntimeError(
        f"ABORTED: The TPU is already in use by process with pid {holder}. Not attempting to load "
        "libtpu.so in this process."
    )

def fail():
    raise RuntimeError(CUDA)

def refuse():
    try:
        fail()
    except RuntimeError:
        xla_bridge.logger.exception(
            "Jax plugin configuration error: Exception when calling %s.initialize()", "cuda"
        )

from windlass.devices import failing, holders, versions
holders.holders = lambda patterns: []
versions.cuda_plugin = lambda: "jax-cuda12-plugin"
versions.disagreement = lambda name: None
failing.has_tpu = lambda: how in ("tpu", "busy_tpu")
failing.has_gpu = lambda: how.endswith("_cuda")
if how == "busy_tpu":
    xla_bridge.register_backend_factory("tpu", busy, priority=300, fail_quietly=True)
elif how == "failing_cuda":
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_backend_factory("cuda", fail, priority=200, fail_quietly=False)
elif how == "refusing_cuda":
    xla_bridge.discover_pjrt_plugins = refuse

from windlass.cli import main

sys.argv = ["windlass", *sys.argv[3:]]
main()
"""


def run(
    how: str, *words: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run a command line with an accelerator that fails; this process seems to hold the TPU."""
    around = {name: x for name, x in trained.environment().items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(os.getpid()), *words],
        env={**around, **(environ or {})},
        capture_output=True,
        text=True,
    )
