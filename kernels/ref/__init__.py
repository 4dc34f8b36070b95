"""Plain-PyTorch twins of the hot-path ops: the specification of every kernel."""
