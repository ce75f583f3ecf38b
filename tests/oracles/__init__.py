"""Exact answers for small problems."""
