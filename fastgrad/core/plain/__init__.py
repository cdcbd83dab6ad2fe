"""What stands in for the compiled module where there is none: the same functions in plain Python, slower."""
