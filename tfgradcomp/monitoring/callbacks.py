"""Keras callbacks."""
