"""Training with parameter servers: weights stay on the workers, words travel."""
