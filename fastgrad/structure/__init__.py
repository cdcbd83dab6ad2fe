"""Where the entries of a Jacobian may be: patterns, their detection and coloring."""
