"""Episodes of several turns: environments and tools in worker processes, tool calls, replay."""
