"""Choose the mesh that a step is fastest on."""
