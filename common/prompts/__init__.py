"""From a row of data to the text and the tokens of a prompt.

- `prompter`: the whole way; training, evaluation, the API and fine-tuning all use it.
- `templates`: fills a problem into a prompt template (`common.settings.prompt_templates`).
- `stated_answers`: finds the answer that a text states. `services.reward.answers.extract` calls it
  first, and falls back to the last value of a response that states none.
- `answer_text`: the part of a response that counts. `phrases`: the words that state or hedge an
  answer. `numerals`: numbers in other scripts.
"""
