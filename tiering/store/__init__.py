"""The prefix store: what it does (protocol), and the embedded one (disk)."""
