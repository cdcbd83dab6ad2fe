"""The order of the checks, and each way to go through a Jacobian."""
