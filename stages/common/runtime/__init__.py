"""What runs stages: their contract, the runner, and the processes below it."""
