"""Attention as the user writes it: functions that change a score or say what is visible (`jax_mfa.flex_attention`).

`program` traces them, `masks` has ready-made ones, `blocks` finds the blocks that they hide, `block_mask` keeps these
(`jax_mfa.BlockMask`), `api` is the public function. The kernels' text of a program is `jax_mfa.metal.functions`.
"""
