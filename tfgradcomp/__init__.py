"""Compressed gradients for multi-worker Keras training."""
