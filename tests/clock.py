"""A clock that tests set."""


class Clock:
    """Seconds that stand still until they are changed."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
