"""The embedded default of `python -m ppo.train`: small real models, built on first use."""
