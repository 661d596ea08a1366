"""The generate stage: prompts → rollouts. The policy answers each prompt; ids, logprobs, seeds and
finish reasons are saved."""
