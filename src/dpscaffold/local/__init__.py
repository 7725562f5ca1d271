"""One user's round: batches, noised gradients and K local steps."""
