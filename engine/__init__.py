"""Sessions: the model, the scheduler and the engine loop."""
