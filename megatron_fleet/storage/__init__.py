"""Files on a local disk and in object stores behind one interface, designed for streaming weights with little memory.

``folder.py`` defines a folder and a file being written, ``open.py`` opens a folder by its address, and ``local.py``
(with ``direct.py``, reads and writes past the page cache), ``s3.py`` and ``gcs.py`` (with ``remote.py``, which the two
share) are the implementations. ``staging.py`` makes a folder of many files appear whole or not at all.
"""
