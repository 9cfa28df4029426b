"""What other processes measure for a study, without TensorFlow."""


def square(key):
    """Returns the measured columns of a row."""
    return {"square": key["number"] ** 2}
