"""The version of Windlass, in its one place."""

__version__ = "0.1.0"
