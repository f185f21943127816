"""What the tests of the compiler share: a reference in float64, and ragged paged batches full of poison."""
