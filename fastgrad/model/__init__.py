"""Finds the operation of a model whose gradient is wrong."""
