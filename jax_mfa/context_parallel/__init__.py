"""Attention over sequences that are split over devices, of one host or of many: context parallelism on JAX's own
runtime.

`layout` says which tokens a device holds, `ring` sends keys and values around, `attend` exchanges heads and has the
derivative, `api` and `decode` take the caller's arguments, `costs` says what each form costs and chooses one. Nothing
here knows how attention of one device is computed. The names for users are those of `jax_mfa` itself.
"""
