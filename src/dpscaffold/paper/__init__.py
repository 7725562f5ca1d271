"""The experiments of the paper, as one application of the library: only its command imports it."""
