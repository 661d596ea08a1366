"""Faster forward passes on a CPU: fused projections, recomputed norms and MLPs."""
