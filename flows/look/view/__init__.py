"""`quiver view`: rollouts in a terminal, token by token, alone or beside another version's."""
