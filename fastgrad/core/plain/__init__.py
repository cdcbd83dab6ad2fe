"""The functions of the compiled module in plain Python, which is slower."""
