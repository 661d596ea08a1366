"""Programs that nobody trusts, run apart by `run_program`."""

from .limits import Limits
from .run import Finished, check, run_program

__all__ = ["Finished", "Limits", "check", "run_program"]
