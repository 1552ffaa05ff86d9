"""The types on the wire, and how they are written as bytes."""
