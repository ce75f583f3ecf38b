"""Programs that run with stand-ins for CUDA devices: what is made for a GPU is made, and nothing is computed.

``guard.cpp`` has to be loaded before torch, so each is a process of its own, with the library for its argument.
"""
