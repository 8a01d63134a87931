"""Files on a local disk and on S3 behind one interface, made for streaming weights through little memory.

``folder.py`` says what a folder and a file being written are, ``open.py`` opens one by its address, ``local.py`` (with
``direct.py``, reads and writes past the page cache) and ``s3.py`` (with ``s3_client.py``) are the two kinds.
``staging.py`` makes a folder of many files appear whole or not at all.
"""
