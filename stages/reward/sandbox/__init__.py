"""Programs that nobody trusts, run apart: `run_program` here, `remote.run_program` on a server."""

from .run import Finished, Limits, check, run_program

__all__ = ["Finished", "Limits", "check", "run_program"]
