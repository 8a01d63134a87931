"""Which sequences are packed into which micro-batch of which data-parallel rank, and the tensors of a micro-batch."""
