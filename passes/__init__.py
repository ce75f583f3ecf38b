"""The passes that carry out a plan, one file each; ``zerofx.pipeline`` lists them in order."""
