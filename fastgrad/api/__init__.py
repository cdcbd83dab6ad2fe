"""The public functions and the validation of their keywords."""
