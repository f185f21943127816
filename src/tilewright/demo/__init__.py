"""`tilewright demo`: a model served on our attention and cache, and a table of cases, each checked and timed."""
