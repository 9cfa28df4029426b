"""The operations in pure TensorFlow: the contract, which native ops equal bit for bit.

They run wherever TensorFlow does, inside XLA too. Vectors are flat; a gradient x may be
a `SplitVector`. `row_splits` gives the blocks: block b is the range
`[row_splits[b], row_splits[b + 1])`, and no block is empty. `random_numbers` states the
numbers that an element draws from a random `stream`.
"""
