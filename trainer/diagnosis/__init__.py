"""What is wrong with a run, since when, the evidence and the remedy.

    run directory, logs ──► run_files ─┐
    living services, ranks ──► live ───┴─► Facts ──► find ──► findings ──► report

`facts` and everything behind it is pure; every finding has a heading in
`docs/how-to/operations.md`.
"""
