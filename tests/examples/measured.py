"""A function for child processes, in a module that does not import TensorFlow."""


def square(key):
    """Returns the measured columns of a row."""
    return {"square": key["number"] ** 2}
