"""Web page that shows whether a run learns, what is slow and what is broken
(docs/how-to/dashboard.md).
"""
