"""Results of a check, as data, text and HTML."""
