"""Measurements of a step that runs."""
