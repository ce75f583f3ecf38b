"""Collectives, groups, and what ranks agree on."""
