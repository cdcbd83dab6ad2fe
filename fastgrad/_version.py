"""The version of fastgrad: the one place that states it."""

__version__ = "0.1.0"
