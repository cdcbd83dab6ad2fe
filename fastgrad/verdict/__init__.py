"""Whether what was computed is right: comparison, re-measuring, certificates."""
