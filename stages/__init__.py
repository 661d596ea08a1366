"""What is done: one package a stage, each runs alone; no stage knows another, nor who runs it."""
