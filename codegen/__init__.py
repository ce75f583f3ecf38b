"""From a step graph to code: regions, the emitted file, and compiled regions."""
