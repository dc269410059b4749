"""Caches of keys and values: contiguous ones and rings, pools of pages, and quantised arrays."""
