"""Sparsity of the Jacobian: patterns, detection and coloring."""
