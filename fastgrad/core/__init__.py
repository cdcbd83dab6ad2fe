"""What needs torch alone: the compiled module, private names, memory, phases, random vectors."""
