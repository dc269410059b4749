"""The commands of `python -m jax_mfa`: check, bench, source and tune."""
