"""Which mesh a step is fastest on."""
