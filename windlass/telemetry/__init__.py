"""Telemetry of a run: metrics in a file, progress on a terminal, throughput and compilations."""

from windlass.config import Every, section


@section
class Telemetry:
    """Metrics and progress."""

    every: Every = Every(10)  # logging interval
