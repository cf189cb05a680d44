"""The TPU compiler, without a TPU, takes whole training steps with the Pallas kernel in them.

It needs libtpu, which there is for x86-64 hosts: `pip install 'windlass[tpu]'`.
"""

from benchmarks.tpu_compile import CASES, measure


def prove() -> dict:
    cases = [measure(case)[0] for case in CASES]
    return {"holds": all(case["fits"] and case["kernels"] > 0 for case in cases), "cases": cases}
