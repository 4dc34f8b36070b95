"""DeepSeek-V4's maths and checkpoints; attention itself is left to the engine's caches."""
