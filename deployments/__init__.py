"""Where and when: recipes to start from."""
