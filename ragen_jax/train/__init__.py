"""Training state, update, loop, warm start, evaluation."""
