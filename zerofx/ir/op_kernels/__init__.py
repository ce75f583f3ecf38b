"""The arithmetic of zerofx's own operators."""
