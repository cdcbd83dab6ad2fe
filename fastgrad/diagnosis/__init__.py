"""Experiments after a failure, and the probable causes that follow from them."""
