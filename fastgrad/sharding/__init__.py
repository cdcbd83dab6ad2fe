"""One check over the ranks of a process group: its columns and rows are computed by all of them."""
