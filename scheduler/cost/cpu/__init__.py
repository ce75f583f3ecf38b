"""Memory that operators hold on a CPU while they run."""
