"""The only folder that touches private names of Keras and TensorFlow.

Tested with TensorFlow 2.20.0 and 2.21.0, Keras 3.10.0 and 3.15.1.
"""
