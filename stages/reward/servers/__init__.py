"""Reward servers: one client, six dialects, and no way for a failure to become a number."""
