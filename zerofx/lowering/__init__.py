"""A plan carried out on a graph: passes, simulation, source, loaded code."""
