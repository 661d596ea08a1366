"""The contract of a stage, its call, the runner, and the processes of stages and users' code."""
