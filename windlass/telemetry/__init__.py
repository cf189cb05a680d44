"""What a run tells of itself: numbers in a file, words on a terminal, and how fast it is."""

from windlass.config import section


@section
class Telemetry:
    """What a run reports."""

    every: int = 10  # steps between reports

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"every is {self.every}; it must be 1 or more")
