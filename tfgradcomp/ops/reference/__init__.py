"""The operations in pure TensorFlow: the contract, which native ops equal bit for bit.

They run wherever TensorFlow does, inside XLA too. Unless an operation says otherwise,

- `x`, `momentum`, `residual` and `variance` are flat vectors, float32 `[count]`; the
  gradient `x` may be a `SplitVector`;
- `row_splits` gives the blocks: block b is the range
  `[row_splits[b], row_splits[b + 1])`, and no block is empty;
- `words` are int32 `[N, words]`, the packed codes of N workers;
- `stream` is a random stream; `random_numbers` states the numbers that elements draw;
- `sizes` are those of the parts of the `SplitVector` to return, all of them flat, or
  None for one tensor.
"""
