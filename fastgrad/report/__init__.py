"""What a check found: results as data, in words and on a page."""
