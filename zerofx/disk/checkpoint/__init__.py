"""Checkpoints on disk: boxes of tensors in safetensors files, and a marker that certifies that they are whole."""
