"""dpscaffold's letters as a Flower App."""
