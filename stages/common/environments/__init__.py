"""Environments and tools that answer a policy, in processes of their own."""
