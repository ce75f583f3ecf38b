"""Carry out a plan on a graph: passes, simulation, source, loaded code."""
