"""Where and when: recipes to start from, and how they are served, deployed and scheduled."""
