"""Isolated runs of untrusted Python programs: `run_program` and its limits."""

from .limits import Limits
from .run import Finished, check, run_program

__all__ = ["Finished", "Limits", "check", "run_program"]
