"""Which operation of a model has a wrong gradient."""
