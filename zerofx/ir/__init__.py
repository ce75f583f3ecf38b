"""The step as a graph: nodes and facts about them, operators of our own, buckets, text, files, aliasing."""
