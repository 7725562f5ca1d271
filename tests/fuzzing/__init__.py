"""What is mutated: configurations, tables and command lines."""
