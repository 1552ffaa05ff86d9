"""What services send one another.

- `schemas`: every type, once.
- `codec`: groups as msgpack or JSON; bounded parsing of foreign bytes.
"""
