"""Rewrites of what a trace gives, one a file, until it is the graph of a step: ``phase.py`` lists them in order."""
