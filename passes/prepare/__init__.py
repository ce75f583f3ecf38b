"""Rewrites of a captured graph before there is a plan."""
