"""The commands of `quiver`, in files by what they are about. Each is thin: it reads, calls what
Python users call, and says."""
