"""Regions compiled by several processes."""
