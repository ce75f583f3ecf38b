"""Rewrites of a traced graph, one a file, until it is the graph of a step: ``phase.py`` lists them in order."""
