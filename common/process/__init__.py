"""What every process needs, whatever it does.

- `cli`, `imports`: command lines and how they end; import paths given as settings.
- `topology`: addresses of all tasks; the only reader of `SKYPILOT_*`.
- `logs`, `metrics`, `watchdog`: log lines, Prometheus metrics, reports of a process that hangs.
- `security`: the token and the certificates of a run.
- `storage`, `run_lock`: disk errors by name; one run per directory.
- `child`, `daemon_threads`, `loop_thread`: child processes and threads that end with this one.
"""
