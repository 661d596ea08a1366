"""The stages: one package each, which runs alone and knows neither other stages nor its runner."""
