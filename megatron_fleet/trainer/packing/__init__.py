"""Packing of sequences into the micro-batches of data-parallel ranks, and the tensors of a micro-batch."""
