"""Second moments of the examples' gradients."""
