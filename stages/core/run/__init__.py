"""The runtime: the contract of a stage, the runner, and the processes that stages run in."""
