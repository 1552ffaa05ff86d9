"""One client per service; each hides retries, codecs and lost answers from its callers.

- `base`: the HTTP client of all of them, and `wait_healthy`.
- `data`, `replay`, `reward`, `environment`: the client of the service of that name.
- `rollout`: the client of the router in front of the engines.
- `network`: connections to services.
"""
