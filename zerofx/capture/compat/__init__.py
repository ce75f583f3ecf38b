"""Corrections of torch's fake tensors and decompositions, where these differ from eager mode."""
