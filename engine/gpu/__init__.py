"""The engine's fast path: the ops of ``kernels`` over the tiers. ``runner`` is its door."""
