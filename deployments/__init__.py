"""Recipes to start from, and the code that serves, deploys and schedules them."""
