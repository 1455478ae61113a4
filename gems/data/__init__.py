"""Where batches come from: each source has `shape`, `classes` and `batches(size, steps, seed)`."""
