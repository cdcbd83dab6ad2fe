"""One check on several ranks of a process group, which all compute columns and rows."""
