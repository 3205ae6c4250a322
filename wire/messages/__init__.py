"""The types that travel between processes and the one codec that turns them into bytes.

No sockets, no files. Golden bytes in tests/golden/wire pin the encoding of every message.
"""
