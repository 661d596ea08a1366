"""The contract of a stage, its call, the runner, and the processes around it."""
