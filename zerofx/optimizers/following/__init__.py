"""Optimizers that cannot be traced once: their own step runs on stand-ins before each step."""
