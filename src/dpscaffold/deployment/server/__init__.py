"""Runs over sites, as their server sees them."""
