"""`quiver fit`: check if a recipe fits a machine, from shapes alone, before anything runs.

It estimates the memory of each stage, the bytes and products of an iteration, and seconds on paper.
"""
