"""Your own model and records in a Flower App, trained with differential privacy."""
