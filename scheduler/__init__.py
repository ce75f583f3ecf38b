"""Costs, simulation and plans: all decisions are made here, and no graph is changed."""
