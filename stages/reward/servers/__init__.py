"""Reward servers: one client and five dialects. A failure never becomes a number."""
