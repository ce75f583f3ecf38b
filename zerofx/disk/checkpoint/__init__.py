"""Checkpoints on disk: boxes of tensors in safetensors files, and a marker that says that they are whole."""
