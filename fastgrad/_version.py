"""The version of fastgrad, defined only here."""

__version__ = "0.1.0"
