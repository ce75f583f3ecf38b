"""Optimizers that are followed by running their own step on stand-ins."""
