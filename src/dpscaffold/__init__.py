"""dpscaffold."""
