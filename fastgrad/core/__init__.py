"""Basics that depend only on torch: the compiled module, private names, memory, phases, random vectors."""
