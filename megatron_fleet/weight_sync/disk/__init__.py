"""``disk``: rank 0 writes a folder, on a file system or S3, that engines anywhere load.

A version is a folder of safetensors files, one for each bucket, and ``manifest.json``, which is written last and has
the checksums; a folder without it is not there. The last two versions are kept.
"""
