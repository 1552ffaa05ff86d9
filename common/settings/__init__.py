"""Every setting once: its declaration, where its value comes from, and checks across sections.

- `sections`, `algorithm`, `rewards`: the declarations; `settings` puts the sections together.
- `checks`: settings that do not fit one another.
- `sources`: values from a file, the environment and the command line.
- `config`: builds the whole configuration; what programs call.
- `chat_templates`, `prompt_templates`: values that are a template: a name, a file or a text.
- `explain`: messages for invalid values; `help`: what `--help` prints.
"""
