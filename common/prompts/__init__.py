"""From a row of data to the text and the tokens of a prompt.

- `prompter`: the whole way; training, evaluation, the API and fine-tuning all use it.
- `templates`: fills a problem into a prompt template (`common.settings.prompt_templates`).
- `final_answers`: finds the answer that a text states.
- `shown`: the part of a text that counts; `phrases`: the words that state or hedge an answer.
"""
