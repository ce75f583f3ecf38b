"""Costs of a plan: bytes over time, seconds, on a machine that need not exist."""
