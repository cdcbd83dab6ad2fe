"""Checks of a function in many situations (variants): states, points, layouts and kinds of derivatives."""
