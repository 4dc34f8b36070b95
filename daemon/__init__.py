"""Bytes: HTTP, wire types, journal, supervision, client and command line. No torch."""
