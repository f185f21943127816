"""Compiled programs: what is kept in memory and on disk, and how a call reaches them."""
