"""Rewrites of regions for CPUs."""
