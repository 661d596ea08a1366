"""generate: prompts → rollouts. A policy answers; ids, logprobs, seeds and the way each row ended
are saved."""
