"""`python -m quiver`, which is the command `quiver`: launchers start modules."""

from quiver.flows.cli.main import main

main()
