"""Plans are as near to compilers, to a GPU and to published speeds as they say."""

from benchmarks import plan_accuracy, plan_anchors


def prove() -> dict:
    found = plan_accuracy.compare()
    tpu, gpu, state = found["tpu"], found["gpu"], found["state"]
    errors = [abs(one.predicted / one.published - 1) for one in plan_anchors.ANCHORS]
    anchors = {"cases": len(errors), "mean_error": sum(errors) / len(errors)}
    holds = [
        tpu["cases"] >= 30 and tpu["do_not_fit"] >= 8 and not tpu["false_fits"],
        tpu["median_error"] <= 0.02 and tpu["worst_error"] <= 0.08,
        gpu["cases"] >= 12 and len(gpu["ran_out_of_memory"]) >= 3 and not gpu["false_fits"],
        gpu["memory_median_error"] <= 0.05 and gpu["time_median_error"] <= 0.15,
        state["worst_error"] <= 0.01,
        all(one["no_slower_than_its_own"] for one in found["settings"].values()),
        anchors["mean_error"] <= plan_anchors.GOAL,
    ]
    return {"holds": all(holds), **found, "anchors": anchors}
