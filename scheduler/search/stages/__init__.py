"""The stages of the search for a plan, a file each; ``search/planner.py`` has their order."""
