"""Environments and tools that answer a policy's turns, run in worker processes."""
