"""What services send one another.

- `schemas`: every type, once.
- `codec`: groups as msgpack or JSON; bounded parsing of foreign bytes.
- `headers`: whether a call is worked on, and how far a store is.
"""
