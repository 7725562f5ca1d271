"""What version 0.2.0 said, frozen: the oracle of every later version (``make compare-old``)."""
