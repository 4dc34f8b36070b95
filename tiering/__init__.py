"""Pages: the radix tree, page pools, hot set, mirror, resume points and the prefix store."""
