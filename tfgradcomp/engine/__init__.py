"""The engine of an optimizer: plan, buckets, step, state and the workers' comparison.

Users import nothing from here. `optimizers/compressed_optimizer.py` puts the parts
together; docs/architecture.md follows a gradient through them.
"""
