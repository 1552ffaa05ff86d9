"""The sandbox for programs of the model: code rewards and the tool `python`.

    server                              bubblewrap: no network, no files, no other processes
    ──────                              ─────────────────────────────────────────────────────
    case_formats.py   parse_cases       inside.py: process 1, one for each run of a program
       │ requests, without the              │ forks, for every case,
       │ expected values                    ├─► the program      exec of its source, one call
       ▼                                    │      ▲ │
    sandbox.py   Sandbox.run ── job ──────► │      │ ▼ messages (program.py ◄─► remote.py)
       ▲            │   ◄── a line a case ──┤      │ │
       │            │                       └─► the test         only for tests in Python
    Case.verdict ◄──┘
       compares with the expected values; values.py carries the program's values between the two

`python_tests.py` refuses tests in which nothing can fail. `command.py` builds the command line and
the seccomp filters, `selftest.py` tries to break out before the first program runs, `meter.py`
counts the time of processes. `inside`, `program`, `remote`, `program_names`, `suite`,
`pytest_names`, `library_values`, `values` and `meter` are also source text for the Python inside,
which may be as old as 3.8.

A program may write anything into its pipe to the test. So a test asks for names (`program_names`),
and a message can only define these, return data, or raise an exception.
"""
