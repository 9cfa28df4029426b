"""Second moments of the gradients of single examples."""
