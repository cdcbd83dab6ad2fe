"""Implements the compiled module in plain Python: the same functions, but slower."""
