"""Recipes, and the small tasks that they train on."""
