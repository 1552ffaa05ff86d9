"""The environment-server: plays episodes, and records every token that the model samples in them.

    trainer ── POST /episodes ──► app ──► EpisodeService          service.py: n episodes a request
                                               │
                                               │ opens a Session for each episode, and runs it with
                                               ▼
                                         EpisodeRunner            runners.py: by environment.name
                                               ├────────────────────┐
                                          ClassRunner          ProgramRunner
                                   python: a class here        agent: a command or a URL
                                   (class_runner.py)           (program_runner.py)
                                               │                    │
                            ┌─ Session.call ───┤                    │
                                               │                    │ POST /sessions/ID/v1/…
                                               │                    ▼
                                               │               app ──► dialects.py: three APIs
                                               ▼                    │
                                            Session ◄── Session.call┘     session.py
             template.py: messages → tokens      │ tokens → sample → engines (rollout-server)
             call_formats.py: text → Message     ▼
                                          SessionTree             tree.py: the turns, token by token
                                               │
    trainer ◄── Episodes ◄── service ◄─────────┴── Outcome        outcome.py: reward, status, counts

`followed.py` follows every request of a session from its first line on: none is lost unseen.

Words of this package: a *call* asks the model for an answer; a *turn* is a call with its answer, as
recorded; a *tool call* is what the model asks for inside an answer; a *program* is a user's process
that plays an episode (the settings call it `agent`).
"""
