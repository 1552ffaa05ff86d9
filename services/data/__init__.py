"""The data-server: hands out prompts, each once per epoch, and remembers where it is.

- `app`: its HTTP API. `stream`: the order of the prompts; `curriculum` prefers useful ones.
- `loaders`: the data set of a setting; `loaders_math`, `loaders_custom` and `tiny` make its prompts
  from rows (`rows`) in files (`files`) or on the hub (`hub`). `sft_examples`: answers for
  supervised fine-tuning.
"""
