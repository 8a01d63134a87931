"""Files on a local disk and on S3 behind one interface, designed for streaming weights with little memory.

``folder.py`` defines a folder and a file being written, ``open.py`` opens a folder by its address, and ``local.py``
(with ``direct.py``, reads and writes past the page cache) and ``s3.py`` are the two
implementations. ``staging.py`` makes a folder of many files appear whole or not at all.
"""
