"""What makes a forward pass faster on a GPU: one kernel in place of several passes over memory."""
