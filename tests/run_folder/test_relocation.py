"""What is told of a run that goes on elsewhere."""

from windlass.run_folder.relocation import relocation


def chose(count: int, per_device: int, accumulation: int = 1, **others) -> dict:
    shape = {"data": 1, "fsdp": count, "tensor": 1}
    batch = {"per_device": per_device, "accumulation": accumulation, "shards": count}
    device = {"asked": "auto", "kind": "TPU v6 lite", "count": count}
    known = {"device": device, "mesh": shape, "batch": batch, "compute": "bfloat16"}
    return {**known, "processes": 1, **others}


def test_a_run_that_goes_on_where_it_was_is_told_nothing():
    again = chose(8, 2)
    again["device"] = again["device"] | {"asked": "tpu"}
    assert relocation(chose(8, 2), again) is None


def test_other_devices_are_told_with_what_each_gets_of_the_same_batch():
    assert relocation(chose(8, 2), chose(4, 2, 2)) == (
        "before on 8 × TPU v6 lite as fsdp 8, 2 sequences per device; now on 4 × TPU v6 lite as "
        "fsdp 4, 2 sequences per device × 2 accumulation: the same batch of 16, losses agree but "
        "not to the bit"
    )


def test_other_processes_and_another_precision_are_told():
    cpu = {"device": {"asked": "cpu", "kind": "cpu", "count": 1}, "compute": "float32"}
    assert relocation(chose(8, 2, processes=2), chose(1, 16, **cpu)) == (
        "before on 8 × TPU v6 lite in 2 processes as fsdp 8 in bfloat16, 2 sequences per device; "
        "now on 1 × cpu in float32, 16 sequences per device: the same batch of 16, losses agree "
        "but not to the bit"
    )


def test_another_number_of_cpu_cores_is_told_as_it_is_another_order_of_sums():
    one, two = (
        chose(1, 16, device={"asked": "cpu", "kind": "cpu", "count": 1, "cores": cores})
        for cores in (1, 2)
    )
    assert relocation(two, two) is None
    assert relocation(two, one) == (
        "before on 1 × cpu on 2 cores, 16 sequences per device; now on 1 × cpu on 1 core, 16 "
        "sequences per device: the same batch of 16, losses agree but not to the bit"
    )
    unknown = chose(1, 16, device={"asked": "cpu", "kind": "cpu", "count": 1})
    assert relocation(unknown, one) is None  # a run of before this was noted
