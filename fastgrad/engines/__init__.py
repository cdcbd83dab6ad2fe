"""Computing Jacobians: dense, compressed, or along random directions."""
