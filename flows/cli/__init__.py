"""The commands of `quiver`, grouped by topic.

Each is thin: it reads its options, calls what Python users call, and prints the answer.
"""
