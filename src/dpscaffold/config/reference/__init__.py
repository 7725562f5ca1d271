"""A reference of every key of a configuration, generated from the code that reads it."""
