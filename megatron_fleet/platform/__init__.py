"""What differs between CPU and CUDA hosts, in one place."""
