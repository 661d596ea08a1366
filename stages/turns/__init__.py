"""Episodes of several turns: environments and tools in their own processes, tool calls, replay."""
