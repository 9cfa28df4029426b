"""The classes of risk of `Auto`, without TensorFlow."""

RISKS = ("none", "low", "medium", "high")
# The greatest error of a layer's mean gradient over its length, by risk. One bit with
# error feedback has no limit.
LIMITS = {"none": 0.0, "low": 0.6, "medium": 0.8, "high": 1.25}
