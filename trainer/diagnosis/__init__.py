"""What is wrong with a run, since when, the evidence and the remedy.

    run directory, logs ──► run_files ─┐
    living services, ranks ──► live ───┴─► Facts ──► find ──► findings ──► report

`facts` and everything behind it is pure. A finding is a row of `trainer.observe.catalogue`: a
heading of `docs/how-to/operations.md`, its remedy, and the codes of errors and log lines by which
it is known. Only what torch, SQLite, Python or the kernel write is known by its words.
"""
