"""Programs that nobody trusts, run apart by `run_program`."""

from .run import Finished, Limits, check, run_program

__all__ = ["Finished", "Limits", "check", "run_program"]
