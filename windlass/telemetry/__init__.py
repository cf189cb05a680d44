"""What a run tells of itself: numbers in a file, words on a terminal, and how fast it is."""

from windlass.config import Every, section


@section
class Telemetry:
    """What a run reports."""

    every: Every = Every(10)  # how often a line is written and shown
