"""Episodes of several turns: tools, environments and the processes they run in, and what stands
between two turns of the policy."""
