"""Whether the results are right: comparison, re-measuring, certificates."""
