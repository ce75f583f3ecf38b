"""From a step graph to code: regions, the emitted file, and the compiler behind it."""
