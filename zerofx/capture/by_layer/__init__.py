"""Capture four of a model's repeated layers, and copy the others from them."""
