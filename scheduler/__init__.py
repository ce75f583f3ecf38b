"""What decides: costs, simulation and plans. Nothing here changes the graph it is asked about."""
