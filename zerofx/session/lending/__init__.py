"""Models that several steps use: who trains one, and how others read it."""
