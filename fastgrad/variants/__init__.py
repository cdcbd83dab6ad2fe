"""Checks of a function in many situations: states, points, layouts and kinds of derivatives."""
