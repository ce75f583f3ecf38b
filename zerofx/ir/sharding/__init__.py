"""Sharding rules: the ways in which the ranks of one axis may share the work of each operator."""
