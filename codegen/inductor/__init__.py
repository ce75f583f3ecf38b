"""Regions compiled by Inductor."""
