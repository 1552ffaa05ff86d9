"""What all services share: the app factory, the server, and what they refuse.

- `app`: `create_app` and `serve`; `openapi` describes the calls.
- Middleware, from the outside in: `tracing`, `admission` (with `callers`).
- `connections`: limits before there is a request. `errors`: the one error shape.
- `delivery`: whether a client has left, and whether it took its answers.
- `disconnect`, `one_thread`: for handlers that wait or block.
- `sqlite_store`: the base of the stores; `store_rollback` refuses a client that has seen a later
  state.
"""
