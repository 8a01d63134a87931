"""``disk`` transport: rank 0 writes a folder, on a file system or S3, that engines anywhere load.

A version is a folder with one safetensors file per bucket and a ``manifest.json``, which holds the checksums and is
written last; a folder without it does not count. The last two versions are kept.
"""
